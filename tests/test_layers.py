"""The house's floors: a module imports its own floor's helpers and the floors below, never above."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLOORS = {
    "interrupt": 0, "quiet": 0, "ranges": 0, "arguments": 0, "shown": 0, "bounded": 0,
    "records": 0, "seeding": 0, "metrics": 0, "collapse": 0, "run_files": 0, "sweep_state": 0, "views": 0,
    "ownership": 0,
    "masked": 1, "aggregation": 1, "batch": 1, "objectives": 1, "advantages": 1, "reward_shaping": 1, "kl": 1,
    "corrections": 1, "terms": 1, "credit": 1, "diagnostics": 1, "tally": 1, "tasks": 1, "rewards": 1, "estimates": 1,
    "elo": 1,
    "policy": 2, "rollout": 2, "peers": 2,
    "checkpoint": 3, "compute": 3, "tracking": 3, "wandb_run": 3, "evaluation": 3, "evaluation_files": 3, "monitor": 3,
    "trainer": 4, "trainer_settings": 4, "cold_start": 4,
    "commands": 5, "schema": 5, "config": 5, "checks": 5, "process": 5,
    "runs": 5, "sweeps": 5, "share": 5, "assembly": 5, "session": 5, "rollback": 5, "run_report": 5, "benchmark": 5,
    "dashboard": 5,
}  # fmt: skip
ONLY_IN = {
    "transformers": ("policy", "rollout", "benchmark"),
    "tokenizers": ("policy",),
    "vllm": ("rollout",),
    "wandb": ("wandb_run", "dashboard"),
    "wandb_workspaces": ("dashboard",),
    "hydra": ("config", "schema", "process", "sweeps", "share"),
    "omegaconf": ("commands", "config", "schema", "process", "sweeps", "share"),
}
NO_TORCH = (
    "records",
    "seeding",
    "metrics",
    "collapse",
    "shown",
    "bounded",
    "monitor",
    "run_files",
    "ownership",
    "sweep_state",
    "views",
    "tasks",
    "rewards",
    "estimates",
    "elo",
)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def rooms():
    for path in sorted((ROOT / "gspo").rglob("*.py")):
        room = path.relative_to(ROOT / "gspo").parts[0].removesuffix(".py")
        if room != "__init__":
            yield room, path


def test_every_room_has_a_floor_and_imports_only_downwards():
    for room, path in rooms():
        assert room in FLOORS, f"{path}: say in this test which floor {room} is on"
        for name in imports(path):
            if name.startswith("gspo."):
                other = name.split(".")[1]
                assert FLOORS[other] <= FLOORS[room], (
                    f"{path} (floor {FLOORS[room]}) imports {name} (floor {FLOORS[other]})"
                )


def test_heavy_packages_stay_in_their_rooms():
    for room, path in rooms():
        packages = {name.split(".")[0] for name in imports(path)}
        for package, allowed in ONLY_IN.items():
            assert package not in packages or room in allowed, f"{path} imports {package}"
        assert room not in NO_TORCH or "torch" not in packages, f"{path} imports torch"


def test_analysis_needs_neither_torch_nor_the_trainer():
    allowed = {"gspo", "gspo.metrics", "gspo.collapse", "gspo.run_files", "gspo.bounded", "gspo.shown"}
    for path in sorted((ROOT / "analysis").glob("*.py")):
        names = imports(path)
        assert "torch" not in {name.split(".")[0] for name in names}, path
        used = {".".join(name.split(".")[:2]) for name in names if name.split(".")[0] == "gspo"}
        assert used <= allowed, f"{path} imports {used - allowed}"


def test_only_the_loader_and_the_report_of_analysis_know_wandb():
    rooms = {"sources.py", "wandb_files.py", "wandb_report.py"}
    for path in (ROOT / "analysis").glob("*.py"):
        packages = {name.split(".")[0] for name in imports(path)}
        assert path.name in rooms or not packages & {"wandb", "wandb_workspaces"}, path


def test_files_and_functions_stay_short():
    for path in [
        *(ROOT / "gspo").rglob("*.py"),
        *(ROOT / "experiments").glob("*.py"),
        *(ROOT / "analysis").glob("*.py"),
    ]:
        text = path.read_text()
        assert text.count("\n") <= 320, f"{path} has {text.count(chr(10))} lines: split it by meaning"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                length = node.end_lineno - node.lineno + 1
                assert length <= 50, f"{path}:{node.name} has {length} lines"
