"""``python -m outrider.cli``, and the console script ``outrider``."""

import signal


def main() -> None:
    """Run the command line. Ctrl-C while its modules are imported ends the process without a traceback."""
    raises = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if raises:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from outrider.cli.app import main as run

    if raises:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


if __name__ == "__main__":
    main()
