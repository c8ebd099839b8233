"""A command of PBS: tells the server how it was called, and says and does what the server answers.

It is copied behind a first line `#!python -IS`, as a file of the command's name; SOCKET is filled in then. The answers
are lines of JSON: ``out`` and ``err`` to be said, ``ask`` for a file, stdin or a terminal, and ``code`` as the last.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

SOCKET = ""
COMMAND = Path(sys.argv[0]).name


def main() -> int:
    """Be the command."""
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(SOCKET)
    except OSError:
        print(f"Connection refused\n{COMMAND}: cannot connect to server pbsctl (errno=15010)", file=sys.stderr)
        return 255
    call = {"command": COMMAND, "args": sys.argv[1:], "folder": str(Path.cwd()), "env": dict(os.environ)}
    call.update(host=os.uname().nodename, terminal=os.isatty(0) and os.isatty(1), path=sys.argv[0])
    tell(server, call)
    if COMMAND == "pbsdsh":  # It has its tasks killed when it is to end itself.
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: tell(server, {"signal": number}))
    for line in server.makefile():
        answer = json.loads(line)
        if "out" in answer:
            os.write(1, answer["out"].encode(errors="surrogateescape"))
        if "err" in answer:
            os.write(2, answer["err"].encode(errors="surrogateescape"))
        if "ask" in answer:
            tell(server, asked(server, *answer["ask"]))
        if "code" in answer:
            return int(answer["code"])
    print(f"{COMMAND}: End of File", file=sys.stderr)  # The server has ended meanwhile.
    return 255


def tell(server: socket.socket, message: dict[str, object]) -> None:
    """Send the server a message."""
    server.sendall(json.dumps(message).encode() + b"\n")


def asked(server: socket.socket, what: str, path: str = "") -> dict[str, object]:
    """Return what the server wants to know; for a terminal, be one from now on."""
    if what == "stdin":
        return {"text": sys.stdin.buffer.read().decode(errors="surrogateescape")}
    if what == "file":
        try:
            with open(path, "rb") as file:
                return {"text": file.read().decode(errors="surrogateescape")}
        except OSError as error:
            return {"error": error.strerror}
    return {"terminal": terminal()}


def terminal() -> str:
    """Open a terminal for the job, carry everything between it and ours, and return its name."""
    import atexit
    import pty
    import shutil
    import struct
    import termios
    import threading
    import tty
    from fcntl import ioctl

    inside, job = pty.openpty()
    size = shutil.get_terminal_size()
    ioctl(job, termios.TIOCSWINSZ, struct.pack("HHHH", size.lines, size.columns, 0, 0))
    name, before = os.ttyname(job), termios.tcgetattr(0)
    atexit.register(termios.tcsetattr, 0, termios.TCSADRAIN, before)
    tty.setraw(0, termios.TCSANOW)

    def carry(source: int, target: int) -> None:
        try:
            while data := os.read(source, 65536):
                os.write(target, data)
        except OSError:  # The job has closed the terminal.
            pass

    for source, target in ((0, inside), (inside, 1)):
        threading.Thread(target=carry, args=(source, target), daemon=True).start()
    return name


if __name__ == "__main__":
    sys.exit(main())
