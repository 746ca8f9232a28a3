. /tests/common.sh
if equal total.txt 49; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
