awk -F, '{ sum += $2 } END { print sum }' stock.csv > total.txt
cut -d, -f1 stock.csv | sort > names.txt
