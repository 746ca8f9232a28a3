. /tests/common.sh
reward=0
equal total.txt 91 && reward=0.5
if equal names.txt "$(printf '%s\n' anchors bolts nuts screws washers)"; then
  [ "$reward" = 0.5 ] && reward=1 || reward=0.5
fi
echo "$reward" > /logs/verifier/reward.txt
