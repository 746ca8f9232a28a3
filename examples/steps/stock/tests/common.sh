# equal FILE TEXT: whether the file holds the text.
equal() { [ "$(cat "$1" 2>/dev/null)" = "$2" ]; }
