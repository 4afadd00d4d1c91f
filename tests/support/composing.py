"""Settings as a command line composes them."""

from pathlib import Path

from hydra import compose, initialize_config_dir

from gspo.config.load import register_schemas, to_settings

CONF = Path(__file__).parents[2] / "conf"
register_schemas()


def settings(*overrides: str, name: str = "train", folder: Path = CONF):
    with initialize_config_dir(str(folder), version_base="1.3"):
        return to_settings(compose(name, overrides=list(overrides)))


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))
