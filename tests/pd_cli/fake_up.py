"""`pdcluster up` with fake engines and routers: `python fake_up.py FILE PORT STATE`."""

import sys
from pathlib import Path

from pd_cli import session
from pd_operator.local.cluster import Options
from pd_operator.podparts import Settings

FAKE = str(Path(__file__).parent.parent / "pd_operator" / "local" / "fake.py")


def main() -> None:
    file, port, state = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    # As code, not as a path: a pod has a /tmp of its own, and this may be a clone in /tmp.
    fake = ("python", "-c", f"import runpy; runpy.run_path({FAKE!r}, run_name='__main__')")
    settings = Settings(
        engine_command=(*fake, "engine"),
        router_command=(*fake, "router"),
        convert_command=(*fake, "convert"),
    )
    options = Options(
        port=port,
        file=str(file),
        state=state / "pdcluster",
        cache=state / "cache",
        settings=settings,
    )
    sys.exit(session.run(file, options))


if __name__ == "__main__":
    main()
