"""Rows from anywhere: what would stop a run later is refused where the file is read; what unpacks
is bounded.
"""

import base64
import gzip
import json
import pickle
import resource
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from commands import SMALL, train
from composing import settings
from gspo.config.checks import check_training_set
from gspo.tasks.benchmarks import livecodebench, records_file
from gspo.tasks.benchmarks.code_sets import HumanEval, Mbpp, RatedPrograms
from gspo.tasks.benchmarks.livecodebench import IMPORTS, LiveCodeBench, Packed, unpacked
from gspo.tasks.benchmarks.math_sets import AIME24, GSM8K, Math500
from gspo.tasks.benchmarks.records_file import file_rows

HALF = "\\ud800"  # as JSON's escape of one half of a character


def lines(path: Path, *rows: object) -> str:
    """A file of records; HALF in a text becomes what JSON reads as a lone surrogate."""
    path.write_text("".join(json.dumps(row).replace("HALF", HALF) + "\n" for row in rows))
    return str(path)


MATH = {"problem": "1+1?", "answer": "2"}
APPS = {"question": "q", "input_output": json.dumps({"inputs": ["1"], "outputs": ["1"]})}
STDIN = [{"input": "1", "output": "1", "testtype": "stdin"}]
CONTEST = {
    "question_content": "q", "platform": "p", "contest_date": "2024-12-01", "starter_code": "", "difficulty": "easy",
    "metadata": "{}", "public_test_cases": json.dumps(STDIN), "private_test_cases": "[]",
}  # fmt: skip
# JSON in a text: the file itself holds whole characters
INNER = json.dumps(STDIN).replace('"1"', f'"{HALF}"')
CALL = json.dumps([{"input": f'"{HALF}"', "output": "1", "testtype": "functional"}])
ROWS = {
    "question": (GSM8K, {"question": "a HALF", "answer": "#### 2"}),
    "answer": (GSM8K, {"question": "a", "answer": "HALF #### 2"}),
    "unread": (Math500, MATH | {"source": {"deep": [["HALF"]]}}),
    "key": (Math500, MATH | {"HALF": 1}),
    "inner key": (Math500, MATH | {"x": {"HALF": 1}}),
    "aime": (AIME24, {"problem": "HALF", "answer": 2}),
    "program": (HumanEval, {"prompt": "def f(x):\n", "entry_point": "f", "test": "HALF"}),
    "assert": (
        Mbpp,
        {"task_id": 11, "text": "t", "code": "def f(): 0", "test_list": ["f() == 'HALF'"]},
    ),
    "stdin": (
        RatedPrograms,
        {"prompt": "p", "rating": 1, "tests": [{"stdin": "HALF", "stdout": ""}]},
    ),
    "contest": (LiveCodeBench, CONTEST | {"question_content": "HALF"}),
    "public tests": (LiveCodeBench, CONTEST | {"public_test_cases": INNER}),
    "private tests": (LiveCodeBench, CONTEST | {"private_test_cases": INNER}),
    "a call": (
        LiveCodeBench,
        CONTEST | {"metadata": '{"func_name": "f"}', "private_test_cases": CALL},
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_half_a_character_is_refused_where_the_file_is_read(name, tmp_path):
    kind, row = ROWS[name]
    path = lines(tmp_path / "test.jsonl", row)
    with pytest.raises(ValueError, match=r"line 1[:,] .*half a character") as refused:
        kind(path=path).size(kind().name)
    str(refused.value).encode()  # what is said can be written itself


def test_half_a_character_in_the_json_of_training_tests_is_refused(tmp_path):
    path = lines(
        tmp_path / "train.jsonl",
        APPS,
        APPS | {"input_output": APPS["input_output"].replace('"1"', f'"{HALF}"')},
    )
    good = lines(
        tmp_path / "test.jsonl",
        {"prompt": "p", "rating": 1, "tests": [{"stdin": "1", "stdout": ""}]},
    )
    with pytest.raises(ValueError, match=r"line 2: .*half characters"):
        RatedPrograms(path=good, train_path=path).size("train")


def test_whole_characters_beyond_the_first_plane_are_read(tmp_path):
    path = lines(
        tmp_path / "test.jsonl", MATH | {"problem": b"\\U0001f600".decode("unicode_escape")}
    )
    assert Math500(path=path).problem(0, "math500", 0).prompt.startswith("\U0001f600")


def test_training_on_such_a_file_is_refused_before_anything_is_written(tmp_path):
    good = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(3)]
    lines(tmp_path / "train.jsonl", *good, {"question": "HALF", "answer": "#### 1"})
    lines(tmp_path / "test.jsonl", {"question": "other", "answer": "#### 1"})
    chosen = settings("task=gsm8k", f"task.path={tmp_path}")
    with pytest.raises(
        ValueError, match=r"train\.jsonl, line 4: the key 'question' holds half a character"
    ):
        check_training_set(chosen)


@pytest.mark.slow
def test_training_on_such_a_file_ends_in_a_line(tmp_path):
    test_training_on_such_a_file_is_refused_before_anything_is_written(tmp_path)
    (tmp_path / "work").mkdir()
    words = [word for word in SMALL if not word.startswith(("task=", "cold_start."))]
    done = train(
        tmp_path / "work", *words, "task=gsm8k", f"task.path={tmp_path}", "tracking.wandb=disabled"
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and "line 4" in done.stderr, (
        done.stderr
    )
    assert not list((tmp_path / "work").rglob("metrics.jsonl"))


@pytest.mark.parametrize("rating", ["NaN", "1e400", "-Infinity", "1" + "0" * 400, "20000"])
def test_a_rating_that_is_no_number_to_reckon_with_is_refused(rating, tmp_path):
    row = json.dumps({"prompt": "p", "rating": 0, "tests": [{"stdin": "1", "stdout": ""}]})
    (tmp_path / "test.jsonl").write_text(row.replace('"rating": 0', f'"rating": {rating}'))
    with pytest.raises(ValueError, match="line 1: the key 'rating' must be a number"):
        RatedPrograms(path=str(tmp_path / "test.jsonl")).size("codeforces")


DEEP = [
    "-" * 200_000 + "1",
    "f()" + ".a" * 200_000,
    "[" * 100 + "]" * 100,
    "f(" * 90 + ")" * 90,
    "lambda:" * 50_000 + "0",
]


@pytest.mark.parametrize("text", DEEP)
def test_a_test_too_deep_for_the_parser_is_refused_or_read(text, tmp_path):
    row = {"task_id": 11, "text": "t", "code": "def f(): 0", "test_list": [text]}
    try:
        Mbpp(path=lines(tmp_path / "test.jsonl", row)).size("mbpp")
    except ValueError as refused:
        assert "line 1" in str(refused)


RAISED_LIMIT = """
import sys
from gspo.tasks.benchmarks.code_sets import Mbpp
sys.setrecursionlimit(10**6)  # as torch._dynamo does
try:
    Mbpp(path=sys.argv[1]).size("mbpp")
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("key", ["code", "test_list"])
@pytest.mark.parametrize("text", ["f()" + ".a" * 200_000, "-" * 200_000 + "1"])
def test_a_text_too_deep_is_refused_under_a_raised_recursion_limit(key, text, tmp_path):
    row = {"task_id": 11, "text": "t", "code": "def f(): 0", "test_list": ["f()"]}
    row[key] = [text] if key == "test_list" else text
    done = subprocess.run(
        [sys.executable, "-c", RAISED_LIMIT, lines(tmp_path / "test.jsonl", row)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"line 1: the key '{key}' holds more than 20,000 characters of Python" in done.stdout


def test_the_longest_chain_that_is_parsed_does_not_kill_the_process(tmp_path):
    text = ("f()" + ".a" * 10_000)[:20_000]
    row = {"task_id": 11, "text": "t", "code": "def f(): 0", "test_list": [text]}
    done = subprocess.run(
        [sys.executable, "-c", RAISED_LIMIT, lines(tmp_path / "test.jsonl", row)], timeout=120
    )
    assert done.returncode == 0


@pytest.mark.parametrize("depth", [52, 700, 5000])
def test_a_value_too_deep_is_refused(depth, tmp_path):
    """Also in a process in which the compilation of a model has raised the recursion limit."""
    (tmp_path / "test.jsonl").write_text(
        f'{{"problem": "p", "answer": "1", "x": {"[" * depth}{"]" * depth}}}'
    )
    with pytest.raises(ValueError, match=r"line 1.*(too deep|not JSON)"):
        Math500(path=str(tmp_path / "test.jsonl")).size("math500")


def test_a_prompt_of_many_markers_is_read_at_once(tmp_path):
    row = {"prompt": "<｜User｜>" * 100_000, "reference_solution": "#### 1"}
    started = time.process_time()
    Math500(path=lines(tmp_path / "test.jsonl", row)).size("math500")
    assert time.process_time() - started < 5


# ---------------------------------------------------------------------------------------------------------
# bombs
MEMORY = """
import resource, sys
from gspo.tasks.benchmarks.records_file import file_rows
from pathlib import Path
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    for row in file_rows(Path(sys.argv[1])):
        pass
except ValueError as error:
    print(error)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def read_apart(path: Path) -> tuple[str, int]:
    """What a process of its own says of a file, and the megabytes that reading it took."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    said, megabytes = done.stdout.strip().rsplit("\n", 1)
    return said, int(megabytes)


def bomb(path: Path, head: bytes, body: bytes, times: int) -> Path:
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(head)
        for _ in range(times):
            file.write(body)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head", "body"),
    [
        ("one.jsonl.gz", b'{"problem": "', b" " * (1 << 20)),  # a line that never ends
        ("list.json.gz", b"[", b"0," * (1 << 19)),
    ],
)
def test_a_small_file_that_unpacks_to_gigabytes_is_refused(name, head, body, tmp_path):
    path = bomb(tmp_path / name, head, body, 320)
    assert path.stat().st_size < 2_000_000
    said, megabytes = read_apart(path)
    assert f"{name}" in said and "more than" in said and megabytes < 500
    path = bomb(tmp_path / name, head, body, 100)
    said, megabytes = read_apart(path)
    assert f"{name}" in said and "more than 100 times its size" in said and megabytes < 300


def test_lines_without_end_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records_file, "MAX_LINES", 10)
    (tmp_path / "test.jsonl").write_text("\n" * 11)
    with pytest.raises(ValueError, match="more than 10 lines"):
        list(file_rows(tmp_path / "test.jsonl"))


def test_a_well_compressed_file_is_read(tmp_path):
    rows = [
        MATH | {"problem": "the same words again and again " * 100 + str(n)} for n in range(2000)
    ]
    with gzip.open(tmp_path / "test.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    assert Math500(path=str(tmp_path / "test.jsonl.gz")).size("math500") == 2000


def test_a_line_without_end_is_refused_also_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(records_file, "MAX_BYTES", 1000)
    lines(tmp_path / "test.jsonl", MATH, MATH | {"problem": "x" * 1000})
    with pytest.raises(
        ValueError, match=r"after line 1: cannot be read: .*more than 1000 bytes in a line"
    ):
        list(file_rows(tmp_path / "test.jsonl"))


def test_a_damaged_gzip_file_is_refused(tmp_path):
    data = bytearray(gzip.compress(json.dumps(MATH).encode() * 100))
    data[20:40] = b"\xff" * 20
    (tmp_path / "test.jsonl.gz").write_bytes(data)
    with pytest.raises(ValueError, match="cannot be read"):
        list(file_rows(tmp_path / "test.jsonl.gz"))


@pytest.mark.slow
def test_parquet_that_repeats_a_long_text_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records_file, "MAX_BYTES", 1 << 22)
    table = pa.table(
        {"problem": pa.array(["x" * (1 << 20)] * 64).dictionary_encode(), "answer": ["1"] * 64}
    )
    parquet.write_table(
        table.cast(pa.schema({"problem": pa.string(), "answer": pa.string()})),
        tmp_path / "a.parquet",
    )
    assert (tmp_path / "a.parquet").stat().st_size < 1 << 20
    with pytest.raises(ValueError, match="bytes in 16 records"):
        list(file_rows(tmp_path / "a.parquet"))


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def test_packed_tests_of_many_opcodes_are_refused_at_once():
    bomb = packed(pickle.PROTO + b"\x04" + pickle.MEMOIZE * 20_000_000 + pickle.STOP)
    started = time.process_time()
    with pytest.raises(ValueError, match="more than 16 opcodes"):
        unpacked(bomb)
    assert len(bomb) < 100_000 and time.process_time() - started < 2


VALUES = ["[]," * 100, "{}," * 100, "0,1," * 100, '"","a",' * 100, "[[[[]]]]," * 100]


@pytest.mark.parametrize("body", VALUES)
def test_tests_of_more_values_than_fit_are_refused_before_there_are_any(body, monkeypatch):
    monkeypatch.setattr(livecodebench, "MAX_VALUES", 150)
    outer = packed(pickle.dumps(f"[{body}0]"))
    functional = json.dumps([{"input": f"[{body}0]", "output": "1", "testtype": "functional"}])
    for public, private in ((f"[{body}0]", "[]"), ("[]", outer), (functional, "[]")):
        with pytest.raises(ValueError, match="more than 150 values"):
            Packed("here", "f", public, private).decoded()
    brackets = json.dumps([{"input": body, "output": ",[{" * 200 + '\\"', "testtype": "stdin"}])
    assert len(Packed("here", "", brackets, "[]").decoded().cases) == 1, "texts are not looked into"


@pytest.mark.slow
def test_packed_tests_of_43_kilobytes_take_no_gigabyte():
    public = packed(pickle.dumps("[" + "[]," * 14_000_000 + "0]"))
    assert len(public) < 60_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match="values"):
        Packed("here", "", public, "[]", IMPORTS).decoded()
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 300


def list_of(count: int, kind: pa.DataType) -> pa.Array:
    """One list of so many nulls."""
    return pa.ListArray.from_arrays(pa.array([0, count], type=pa.int32()), pa.nulls(count, kind))


def refused(folder: Path, **columns: pa.Array) -> str:
    """What is said of a Parquet file with one record of these columns."""
    parquet.write_table(pa.table({"problem": ["1+1"], **columns}), folder / "a.parquet")
    assert (folder / "a.parquet").stat().st_size < 1 << 16
    with pytest.raises(ValueError, match=r"a\.parquet: cannot be read as Parquet: ") as caught:
        list(file_rows(folder / "a.parquet"))
    return str(caught.value).partition("as Parquet: ")[2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pa.bool_(), pa.int8()], ids=str)
def test_a_parquet_file_of_a_kilobyte_does_not_fill_the_memory(tmp_path, kind):
    """A list of nulls takes a few bytes in the file."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = refused(tmp_path, x=list_of(70_000_000, kind))
    assert said.startswith(
        "a row group has 70000001 values, more than 67108864, and most of them are of x.list.element:"
    )
    table = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert table < 600 * 1024, "kilobytes, most of them to write the file"


@pytest.mark.parametrize(
    "nested", ["list", "large list", "fixed", "struct", "map", "list of structs"]
)
def test_values_are_counted_however_they_are_nested(tmp_path, monkeypatch, nested):
    monkeypatch.setattr(records_file, "MAX_BATCH_VALUES", 100)
    inner = pa.array(range(101))
    column = {
        "list": lambda: pa.array([list(range(101))]),
        "large list": lambda: pa.array([list(range(101))], type=pa.large_list(pa.int64())),
        "fixed": lambda: pa.FixedSizeListArray.from_arrays(inner, 101),
        "struct": lambda: pa.array([{"a": {"b": list(range(101))}}]),
        "map": lambda: pa.array(
            [[(str(i), i) for i in range(60)]], type=pa.map_(pa.string(), pa.int64())
        ),
        "list of structs": lambda: pa.array([[{"a": i} for i in range(60)]]),
    }[nested]()
    assert refused(tmp_path, x=column) == "there are more than 100 values in 16 records"
    monkeypatch.setattr(records_file, "MAX_BATCH_VALUES", 300)
    assert len(list(file_rows(tmp_path / "a.parquet"))) == 1


def test_dates_that_python_has_no_type_for_are_one_line(tmp_path):
    assert refused(tmp_path, x=pa.array([10**7], type=pa.date32())).startswith(
        "records 1 to 1 hold a value that Python has no type for: "
    )


def test_a_parquet_file_with_too_many_records_is_refused_before_they_are_read(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(records_file, "MAX_LINES", 20)
    parquet.write_table(pa.table({"problem": ["x"] * 21}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="there are more than 20 records"):
        list(file_rows(tmp_path / "a.parquet"))


def test_values_of_many_columns_add_up(tmp_path, monkeypatch):
    monkeypatch.setattr(records_file, "MAX_ROW_GROUP_VALUES", 1000)
    columns = {f"x{i}": list_of(100, pa.int8()) for i in range(12)}
    assert refused(tmp_path, **columns).startswith("a row group has 1201 values, more than 1000")


def test_a_text_that_a_dictionary_repeats_is_counted_each_time(tmp_path, monkeypatch):
    """A file of 300 bytes may give gigabytes, in batches of which each is small."""
    monkeypatch.setattr(records_file, "MAX_BYTES", 1 << 22)
    texts = pa.array(["x" * 100_000] * 400)
    for problems in (texts, texts.dictionary_encode()):
        table = pa.table({"problem": problems, "answer": ["1"] * 400})
        parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
        assert (tmp_path / "a.parquet").stat().st_size < 5000
        with pytest.raises(
            ValueError, match=r"it unpacks to more than 100 times its size: if that is meant, write"
        ):
            list(file_rows(tmp_path / "a.parquet"))
