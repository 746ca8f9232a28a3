awk -F, '{ sum += $2 } END { print sum }' stock.csv > total.txt
