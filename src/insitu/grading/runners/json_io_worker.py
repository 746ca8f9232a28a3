"""Worker of runner `json_io`, run in the sandbox as `python -s -S -B -c <this file>`, cwd /.

Reads one trusted Python literal from stdin: root, entry, address_space, cpu_s, ready, max_bytes and calls, a
list of (id, function or Class.method, args). Writes to a private copy of stdout: `[ready]`, then per call one
JSON line `[id,true,value]` or `[id,false,"ErrorName"]`. It has no expected value. json, os and importlib
would double the start-up time, so they are not imported.
"""

import posix
import sys
from _json import encode_basestring_ascii as quote

if sys.version_info < (3, 10):
    raise SystemExit("Python {}.{} in the sandbox is too old: 3.10 or newer".format(*sys.version_info))

MAX_DEPTH = 64
MAX_NODES = 200_000
MAX_DIGITS = 100_000  # Python's own limit is inexact from 3.12 on


def encode(value: object, depth: int, budget: list[int]) -> str:
    """Return the JSON text of a value; tuples, sets and dicts with other keys become tagged objects.

    Raises TypeError or ValueError for any other value.
    """
    # `type(x) is` and not isinstance: a subclass may override comparison, repr and hash.
    budget[0] -= 1
    if depth > MAX_DEPTH or budget[0] < 0:
        raise ValueError("value too large")
    if value is None:
        return "null"
    if value is True or value is False:
        return "true" if value else "false"
    if type(value) is str:
        return quote(value)
    if type(value) is int:
        text = int.__repr__(value)
        if len(text) - (value < 0) > MAX_DIGITS:
            raise ValueError("too many digits")
        return text
    if type(value) is float:
        if value - value != 0.0:
            raise ValueError("not finite")
        return float.__repr__(value)
    return _encode_many(value, depth, budget)


def _encode_many(value: object, depth: int, budget: list[int]) -> str:
    """Return the JSON text of a container."""
    if type(value) is list:
        return "[" + ",".join([encode(item, depth + 1, budget) for item in value]) + "]"
    if type(value) is tuple:
        return tagged("tuple", [encode(item, depth + 1, budget) for item in value])
    if type(value) is set or type(value) is frozenset:
        return tagged("set", sorted([encode(item, depth + 1, budget) for item in value]))
    if type(value) is dict:
        return _encode_dict(value, depth, budget)
    raise TypeError("not a JSON value")


def _encode_dict(value: dict[object, object], depth: int, budget: list[int]) -> str:
    if all([type(key) is str for key in value]):
        pairs = [quote(key) + ":" + encode(item, depth + 1, budget) for key, item in value.items()]  # type: ignore[arg-type]
        return "{" + ",".join(pairs) + "}"
    pairs = [
        "[" + encode(key, depth + 1, budget) + "," + encode(item, depth + 1, budget) + "]"
        for key, item in value.items()
    ]
    return tagged("dict", sorted(pairs))


def tagged(kind: str, items: list[str]) -> str:
    """Return a tagged object; a candidate may return the same as a dict, which gains nothing."""
    return '{"\\u0000' + kind + '":[' + ",".join(items) + "]}"


def send(out: int, text: str) -> None:
    data = text.encode() + b"\n"
    while data:
        data = data[posix.write(out, data) :]


def _error_name(error: BaseException) -> str:
    name = type(error).__name__
    plain = type(name) is str and name.isascii() and name.isidentifier() and len(name) <= 40
    return name if plain else "Error"


def read_job() -> dict:  # type: ignore[type-arg]
    chunks = []
    while chunk := posix.read(0, 1 << 16):
        chunks.append(chunk)
    return eval(b"".join(chunks), {"__builtins__": {}})  # type: ignore[no-any-return]


def limit(address_space: int, cpu_s: int) -> None:
    """Limit address space (shared mappings too) and CPU time: SIGXCPU, and SIGKILL a second later."""
    import resource

    for what, soft, hard in (
        (resource.RLIMIT_AS, address_space, address_space),
        (resource.RLIMIT_CPU, cpu_s, cpu_s + 1),
    ):
        try:
            resource.setrlimit(what, (soft, hard))
        except (ValueError, OSError):
            continue  # the sandbox is tighter already


def load(root: str, entry: str, stdlib: frozenset[str]) -> dict[str, object]:
    """Execute the candidate module from source and return its names."""
    # Compiled here: no cache file is used. The work folder comes last on sys.path, so that its modules never
    # shadow the standard library.
    posix.chdir(root)
    sys.path.append(root)
    name = entry.removesuffix(".py").replace("/", ".")
    package = name.rpartition(".")[0]
    if name.partition(".")[0] in stdlib:
        name, package = "candidate_" + name.replace(".", "_"), ""
    if package:
        __import__(package)
    module = type(sys)(name)
    module.__file__ = root + "/" + entry
    module.__package__ = package
    sys.modules[name] = module
    with open(module.__file__, "rb") as file:
        code = compile(file.read(), module.__file__, "exec", dont_inherit=True)
    exec(code, module.__dict__)
    return module.__dict__


def answer(names: dict, function: str, args: list[object], left: int) -> str:  # type: ignore[type-arg]
    name, _, method = function.partition(".")
    call = names[name]
    if method:
        call = getattr(call(), method)
    text = encode(call(*args), 0, [MAX_NODES])
    if len(text) > left:
        raise ValueError("value too large")
    return text


def main() -> None:
    sys.path[:] = [path for path in sys.path if path]  # the cwd of -c, of a Python without -P
    stdlib = sys.stdlib_module_names
    job = read_job()
    out = posix.dup(1)
    null = posix.open("/dev/null", posix.O_RDWR)
    for fd in (0, 1, 2):
        posix.dup2(null, fd)
    limit(job["address_space"], job["cpu_s"])
    send(out, "[" + quote(job["ready"]) + "]")
    broken = ""
    names: dict[str, object] = {}
    try:
        names = load(job["root"], job["entry"], stdlib)
    except BaseException as error:  # noqa: BLE001 - whatever the candidate raises is its own doing
        broken = _error_name(error)
    left = job["max_bytes"]
    for key, function, args in job["calls"]:
        claim = ",false," + quote(broken)
        if not broken:
            try:
                claim = ",true," + answer(names, function, args, left)
            except BaseException as error:  # noqa: BLE001
                claim = ",false," + quote(_error_name(error))
        left -= len(claim)
        send(out, "[" + quote(key) + claim + "]")
    posix._exit(0)  # without atexit handlers and threads of the candidate


if __name__ == "__main__":
    main()
