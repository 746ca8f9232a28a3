"""Shell scripts of the harbor backend, for any POSIX shell with tar, find, xargs and base64."""

from __future__ import annotations

# In a session of its own, so that it goes on when the call that started it is cut.
EXEC = """
folder=$1; cwd=$2; blocks=$3; shift 3
cd "$folder" && echo $$ > begun/pid && . ./env && mkfifo o e || exit 125
{ ( ulimit -f "$blocks"; exec cat > out ) ; exec cat; } < o > /dev/null 2>&1 & a=$!
{ ( ulimit -f "$blocks"; exec cat > err ) ; exec cat; } < e > /dev/null 2>&1 & b=$!
( cd "$cwd" || exit 126; exec "$@" ) < "$folder/input" > "$folder/o" 2> "$folder/e"
echo $? > exit; n=0
while [ $n -lt 20 ] && { kill -0 $a || kill -0 $b; } 2> /dev/null; do sleep 0.05; n=$((n + 1)); done
: > done
"""
_REPORT = """
{ cat exit 2> /dev/null || echo none; } && for f in out err; do
  { head -c "$most" $f 2> /dev/null | base64 | tr -d '\\n'; echo; }; done
"""
# Starts EXEC once, however often it is called, and waits for its end, but not for long.
FOLLOW = (
    """
folder=$1; most=$2; rounds=$3; exec=$4; shift 4
cd "$folder" || exit 125
if mkdir begun 2> /dev/null; then
  nohup setsid sh -c "$exec" exec "$folder" "$@" > /dev/null 2>&1 < /dev/null &
fi
alive() { said=$(cat "/proc/$1/stat" 2> /dev/null) || return 1
  set -- ${said##*) }; case $1 in Z | X) return 1 ;; esac; }
n=0
until [ -f done ]; do
  n=$((n + 1)); pid=$(cat begun/pid 2> /dev/null)
  [ -z "$pid" ] || alive "$pid" || break
  [ $n -lt "$rounds" ] || { if [ -n "$pid" ]; then echo running; else echo lost; fi; exit; }
  pause=0.5; [ $n -gt 70 ] || pause=0.1; [ $n -gt 25 ] || pause=0.02
  sleep $pause 2> /dev/null || sleep 1
done
"""
    + _REPORT
)
REPORT_LATE = 'folder=$1; most=$2\ncd "$folder" || exit 125\n' + _REPORT
KILL_ALL = """
mark=$1
for round in 1 2 3 4 5 6 7 8 9 10; do
  found=
  for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}; [ "$pid" != $$ ] || continue
    said=$({ tr '\\0' '\\n' < "$folder/environ"; } 2> /dev/null | grep -x "INSITU_[A-Z]*=[0-9A-Z]*")
    case "$said" in *"$mark"*) ;; *) continue ;; esac
    found="$found $pid"; kill -STOP "$pid" 2> /dev/null
  done
  [ -n "$found" ] || exit 0
  kill -9 $found 2> /dev/null
done
exit 1
"""
TERMINATE = """
mark=$1
for folder in /proc/[0-9]*; do
  pid=${folder#/proc/}; [ "$pid" != $$ ] || continue
  { tr '\\0' '\\n' < "$folder/environ"; } 2> /dev/null | grep -qx "$mark" && kill -TERM "$pid" 2> /dev/null
done
true
"""
UNPACK = """
mkdir -p "${1%/*}" && tar -xzf "$2" -C / --no-same-owner && rm -f "$2"
"""
LAY = """
cd "$1" && { [ ! -s "$2/remove" ] || xargs -0 rm -rf -- < "$2/remove"; } || exit 1
[ ! -s "$2/names" ] || xargs -0 sh -c 'for p; do if [ -d "$p" ] && [ ! -L "$p" ]; then rm -rf -- "$p"; fi
done' x < "$2/names"
tar -xf "$2/tree.tar" --no-same-owner && rm -rf "$2"
"""
OPEN_UP = """
cd "$1" && find . -type d ! -perm -u+rwx -exec chmod u+rwx {} \\;
"""
EMPTY = OPEN_UP + "find . -mindepth 1 -maxdepth 1 -exec rm -rf -- {} +"
PLACE = """
mkdir -p "$1" "$2" && [ "$(readlink -f "$2")" = "$(readlink -f "$3")${2#"$3"}" ] || {
  echo "$2 leads elsewhere" >&2; exit 1; }
"""
GET_TREE = (
    OPEN_UP
    + """find . -type f ! -perm -u+r -exec chmod u+r {} +
tar -cf - . 2> /dev/null | head -c "$2" > "$3"
"""
)
GET = """
[ "$(readlink -f "${1%/*}")" = "${1%/*}" ] && [ -f "$1" ] && [ ! -L "$1" ] && echo 1 && head -c "$2" "$1"
"""
LOOK = """
look() { said=$(cat "/proc/$1/stat" 2> /dev/null) || return 1
  set -- ${said##*) }; state=$1; parent=$2; time=${20}; }
"""
LIST = (
    LOOK
    + """
for folder in /proc/[0-9]*; do pid=${folder#/proc/}; look "$pid" && printf ' %s:%s ' "$pid" "$time"; done
true
"""
)
# Kills everything but init, what ran before the sandbox was handed out (a vendor's service), and this command
# with its ancestors. A process whose main thread exited shows as zombie while its other threads run.
KILL_REST = (
    LOOK
    + """
known=$1
mine=" 1 "; parent=$$
while [ "$parent" -gt 1 ]; do mine="$mine$parent "; look "$parent" || break; done
for round in 1 2 3 4 5 6 7 8 9 10; do
  all=
  for folder in /proc/[0-9]*; do
    pid=${folder#/proc/}
    case "$mine" in *" $pid "*) continue ;; esac
    look "$pid" && kill -0 "$pid" 2> /dev/null || continue
    case "$state" in Z | X)
      others=
      for task in "$folder"/task/*; do [ "${task##*/}" = "$pid" ] || others=1; done
      [ -n "$others" ] || continue ;;
    esac
    case "$known" in *" $pid:$time "*) continue ;; esac
    all="$all $pid"
  done
  [ -n "$all" ] || exit 0
  kill -STOP $all 2> /dev/null
  kill -9 $all 2> /dev/null
done
exit 1
"""
)
