"""`pdcluster up` with fake engines and routers: `python fake_up.py FILE PORT STATE`."""

import sys
from pathlib import Path

from pd_cli import session
from pd_operator.local.cluster import Options
from pd_operator.podparts import Settings

FAKE = str(Path(__file__).parent.parent / "pd_operator" / "local" / "fake.py")


def main() -> None:
    file, port, state = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    settings = Settings(
        engine_command=("python", FAKE, "engine"),
        router_command=("python", FAKE, "router"),
        convert_command=("python", FAKE, "convert"),
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
