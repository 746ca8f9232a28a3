# Runs before the agent of this step starts.
printf "anchors,2\nscrews,40\n" >> stock.csv
