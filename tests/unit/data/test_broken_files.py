"""Files as people break them: each gives one line for each problem, which quotes no text."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmm.config.settings import DataSettings
from gradmm.data import sources
from gradmm.data.splits import Splits, load_splits
from gradmm.errors import InputError

GOOD_ROWS = "".join(f"a zqxwvj text {i},{'good' if i % 2 else 'bad'}\n" for i in range(40))
GOOD = f"text,label\n{GOOD_ROWS}"
JSON_ROWS = "".join(
    f'{{"text": "a zqxwvj text {i}", "label": "{"good" if i % 2 else "bad"}"}}\n' for i in range(40)
)


def load(file: Path) -> Splits:
    settings = DataSettings(
        path=str(file),
        label_names=("bad", "good"),
        validation_split=None,
        test_split=None,
        validation_rows=8,
        test_rows=8,
    )
    return load_splits(settings, (0, 1), 0)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("plain.csv", GOOD.encode()),
        ("bom.csv", GOOD.encode("utf-8-sig")),
        ("windows.csv", GOOD.replace("\n", "\r\n").encode()),
        ("no-end-of-line.csv", GOOD.rstrip().encode()),
        ("quoted.csv", (GOOD + '"a, ""zqxwvj""\ntext",good\n').encode()),
        ("emoji.csv", (GOOD + "🙂 zqxwvj\u200d text,good\n").encode()),
        ("long.csv", (GOOD + "zqxwvj " * 1_500_000 + ",good\n").encode()),
        ("blanks.csv", GOOD.replace(",good", ", good ").encode()),
        ("empty-lines.csv", GOOD.replace("text 3,good\n", "text 3,good\n\n\n").encode()),
        ("semicolons.csv", ("\ufeff" + GOOD.replace(",", ";") + '"a; ""zqxwvj"", text";good\n').encode()),
        ("old-mac.csv", (GOOD + '"a, zqxwvj; text",good\n').replace("\n", "\r").encode()),
        ("empty-first-line.csv", ("\n" + GOOD).encode()),
        ("tabs.csv", (GOOD.replace(",", "\t") + "a, zqxwvj; text\tgood\n").encode()),
        ("bars.csv", GOOD.replace(",", "|").encode()),
        ("upper-case.CSV", GOOD.encode()),
        ("semicolons-in-texts.csv", (GOOD + "a; zqxwvj; text,good\n").encode()),
        (
            "semicolon-in-header.csv",
            GOOD.replace("text,label", "text,label,a;b")
            .replace(",good\n", ",good,1\n")
            .replace(",bad\n", ",bad,1\n")
            .encode(),
        ),
        ("plain.tsv", GOOD.replace(",", "\t").encode()),
        ("plain.jsonl", JSON_ROWS.encode()),
        ("array.json", ("[" + JSON_ROWS.strip().replace("\n", ",") + "]").encode()),
        ("more-keys.jsonl", (JSON_ROWS + '{"text": "zqxwvj", "label": "good", "more": {"a": [1]}}\n').encode()),
    ],
)
def test_odd_but_sound_files_are_read(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    splits = load(tmp_path / name)
    assert len(splits.train) >= 24
    assert set(splits.test.labels) == {0, 1}


def csv_of(*rows: str, header: str = "text,label") -> bytes:
    return "\n".join([header, GOOD_ROWS.strip(), *rows]).encode()


def label_first(*rows: str) -> bytes:
    """Good rows and others, in which the text is the last field, so that one can reach to the end of the file."""
    swapped = [",".join(reversed(row.rsplit(",", 1))) for row in GOOD_ROWS.strip().split("\n")]
    return "\n".join(["label,text", *swapped, *rows]).encode()


def jsonl_of(*rows: str) -> bytes:
    return (JSON_ROWS + "\n".join(rows)).encode()


BROKEN: list[tuple[str, bytes, list[str]]] = [
    ("empty.csv", b"", ["cannot be read (Empty CSV file)"]),
    ("spaces.csv", b" \n \n", ["'text'", "'label'"]),
    ("header-only.csv", b"text,label\n", ["contains no rows"]),
    ("no-header.csv", GOOD_ROWS.encode(), ["their names look like values", "their names look like values"]),
    ("carets.csv", GOOD.replace(",", "^").encode(), ["neither of 'text'", "no column 'label'"]),
    ("three-rows.csv", b"text,label\na,good\nb,bad\nc,good\n", ["cannot be held out of the 3 rows"]),
    ("one-class.csv", GOOD.replace("bad", "good").encode(), ["has the label 0"] * 3),
    ("other-names.csv", csv_of(header="review,stars"), ["neither of 'text' and 'sentence'", "no column 'label'"]),
    ("twice.csv", csv_of(header="text,text"), ["2 columns are called 'text'", "no column 'label'"]),
    ("ragged.csv", csv_of("zqxwvj,more,good"), ["row 40 has 3 fields instead of 2"]),
    (
        "open-quote.csv",
        label_first('good,"zqxwvj', "bad,b", "good,c"),
        ["row 40 has a quotation mark that is neither closed nor doubled"],
    ),
    (
        "two-stray-quotes.csv",
        csv_of('"zqxwvj,good', "b,bad", 'c "d" e,good', "f,bad"),
        ["row 40 has a quotation mark that is neither closed nor doubled"],
    ),
    (
        "open-quote-after-lines.csv",
        label_first('good,"a\n""b"', "", 'good,"zqxwvj', "bad,b"),
        ["row 41 has a quotation mark that is neither"],
    ),
    ("short-row.csv", csv_of("zqxwvj"), ["row 40 has 1 fields instead of 2"]),
    (
        "latin-1.csv",
        csv_of().replace(b"text 3", "téxt 3".encode("latin-1")),
        ["holds binary, not text; save the file as UTF-8"],
    ),
    ("utf-16.csv", GOOD.encode("utf-16"), ["cannot be read (it is UTF-16; save it as UTF-8)"]),
    ("nul.csv", b"\0" * 100, ["cannot be read"]),
    ("binary.csv", bytes(range(256)) * 4, ["cannot be read"]),
    ("binary-rows.csv", b"text,label\r\xc9,\xc9,\xc9\r", ["cannot be read (row 0 has 3 fields instead of 2)"]),
    (
        "numbers.csv",
        b"text,label\n" + b"".join(b"%d,good\n" % i for i in range(40)),
        ["holds int64, not text"],
    ),
    ("no-text.csv", csv_of(",good", ",bad"), ["row 40 has an empty text (and 1 more rows)"]),
    ("blank-text.csv", csv_of("   ,good"), ["row 40 has an empty text"]),
    ("no-label.csv", csv_of("zqxwvj,"), ["row 40 has no label"]),
    ("upper-case.csv", csv_of("zqxwvj,Good"), ["row 40 has a label that is not among data.label_names"]),
    (
        "new-label.csv",
        csv_of("zqxwvj,so-so", ",good"),
        ["row 41 has an empty text", "row 40 has a label that is not"],
    ),
    ("both-empty.csv", csv_of(","), ["row 40 has an empty text", "row 40 has no label"]),
    ("empty.jsonl", b"", ["cannot be read (Empty JSON file)"]),
    ("cut.jsonl", jsonl_of('{"text": "zqxwvj", "la'), ["cannot be read (JSON parse error"]),
    ("null-text.jsonl", jsonl_of('{"text": null, "label": "good"}'), ["row 40 has no text"]),
    ("missing-key.jsonl", jsonl_of('{"label": "good"}'), ["row 40 has no text"]),
    ("null-label.jsonl", jsonl_of('{"text": "zqxwvj", "label": null}'), ["row 40 has no label"]),
    ("mixed.jsonl", jsonl_of('{"text": 7, "label": "good"}'), ["cannot be read (JSON parse error"]),
    ("nested.jsonl", b'{"text": ["zqxwvj"], "label": {"zqxwvj": 1}}\n', ["holds list", "holds struct"]),
    ("list-label.jsonl", b'{"text": "zqxwvj", "label": [1, 0]}\n', ["holds list<item: int64>, not labels"]),
    ("twice.jsonl", b'{"text": "a", "text": "zqxwvj", "label": "good"}\n', ["cannot be read (JSON parse error"]),
    ("nan.jsonl", jsonl_of('{"text": NaN, "label": "good"}'), ["cannot be read"]),
    ("deep.json", b"[" * 50_000, ["cannot be read"]),
    ("numbers.json", b"[1, 2, 3]", ["a JSON array of something else than records"]),
    (
        "mixed.json",
        b'[{"text": "zqxwvj", "label": "good"}, {"text": 1}]',
        ["a column has values of different types"],
    ),
    ("object.json", b'{"rows": [{"text": "zqxwvj"}]}', ["'text'", "'label'"]),
    ("wrong-name.parquet", GOOD.encode(), ["cannot be read (Parquet magic bytes not found"]),
    ("empty.parquet", b"", ["cannot be read (Parquet file size is 0 bytes)"]),
    ("book.xlsx", b"PK\x03\x04", ["files that end in '.xlsx' are not read"]),
    ("text.txt", GOOD.encode(), ["files that end in '.txt' are not read"]),
    ("no-ending", GOOD.encode(), ["files that end in '' are not read"]),
    ("zipped.csv.gz", b"\x1f\x8b", ["files that end in '.gz' are not read"]),
]


@pytest.mark.parametrize(("name", "content", "problems"), BROKEN, ids=[name for name, _, _ in BROKEN])
def test_each_problem_of_a_broken_file_has_a_line(
    tmp_path: Path, name: str, content: bytes, problems: list[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        load(tmp_path / name)
    lines = str(caught.value).split("\n")
    assert len(lines) == len(problems), lines
    assert all(any(problem in line for line in lines) for problem in problems), lines
    assert all("; " in line and line.isprintable() for line in lines)
    assert "zqxwvj" not in str(caught.value)


def test_a_value_of_another_type_in_a_later_block_is_not_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files above 1 GiB have several blocks; the first one decides the types."""
    monkeypatch.setattr(sources, "_one_block", lambda _: 640)
    rows = [f'{{"text": "a text", "label": "good", "code": {i}}}' for i in range(100)]
    rows += ['{"text": "a text", "label": "bad", "code": "zqxwvj"}'] * 100
    lines = [f"{row:63}\n" for row in rows]  # ten of them are a block
    (tmp_path / "codes.jsonl").write_text("".join(lines))
    with pytest.raises(InputError, match=r"cannot be read .*a value of another type") as caught:
        load(tmp_path / "codes.jsonl")
    assert "zqxwvj" not in str(caught.value)
