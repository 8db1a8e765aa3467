"""A Python whose main thread computes, while a thread that it does not know makes all-reduces."""

import ctypes
import sys
import threading


def main() -> int:
    library, *arguments = sys.argv[1:]
    given = [argument.encode() for argument in ("foreign", *arguments)]
    run = ctypes.CDLL(library).run_apart
    codes: list[int] = []

    def call() -> None:
        codes.append(run(len(given), (ctypes.c_char_p * len(given))(*given)))

    thread = threading.Thread(target=call)
    thread.start()
    while thread.is_alive():
        sum(range(100_000))  # with the GIL, as a training's main thread has it
        thread.join(0.005)
    return codes[0]


if __name__ == "__main__":
    sys.exit(main())
