import itertools
import re

import pyarrow as pa
import pytest

from intune._errors import SourceError
from intune.sources._schema import check_columns, merge_schemas


def merged(*types: pa.DataType) -> pa.DataType:
    return (
        merge_schemas([(f"/{index}", pa.schema([("a", kind)])) for index, kind in enumerate(types)], None).field(0).type
    )


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        ([pa.int32(), pa.int64()], pa.int64()),
        ([pa.int8(), pa.int16(), pa.int32()], pa.int32()),
        ([pa.uint8(), pa.uint32()], pa.uint32()),
        ([pa.uint8(), pa.int8()], pa.int16()),
        ([pa.uint8(), pa.int64()], pa.int64()),
        ([pa.uint32(), pa.int32()], pa.int64()),
        ([pa.uint32(), pa.int16(), pa.int8()], pa.int64()),
        ([pa.float32(), pa.float64()], pa.float64()),
        ([pa.float16(), pa.float32()], pa.float32()),
        ([pa.list_(pa.int32()), pa.list_(pa.int32())], pa.list_(pa.int32())),
        ([pa.string(), pa.string()], pa.string()),
    ],
)
def test_safe_widening_in_any_order(types: list[pa.DataType], expected: pa.DataType) -> None:
    for order in itertools.permutations(types):
        assert merged(*order) == expected


@pytest.mark.parametrize(
    "types",
    [
        [pa.int32(), pa.float64()],
        [pa.int64(), pa.uint64()],
        [pa.uint64(), pa.int8(), pa.uint32()],
        [pa.uint32(), pa.int32(), pa.uint64()],
        [pa.int32(), pa.string()],
        [pa.string(), pa.large_string()],
        [pa.bool_(), pa.int8()],
        [pa.timestamp("us"), pa.timestamp("ms")],
        [pa.date32(), pa.int32()],
        [pa.decimal128(10, 2), pa.decimal128(12, 2)],
        [pa.list_(pa.int32()), pa.list_(pa.int64())],
        [pa.dictionary(pa.int32(), pa.string()), pa.string()],
        [pa.null(), pa.int32()],
    ],
)
def test_everything_else_is_an_error_in_any_order_that_names_files_column_and_types(types: list[pa.DataType]) -> None:
    for order in itertools.permutations(types):
        with pytest.raises(SourceError, match="column 'a' is") as caught:
            merged(*order)
        found = re.findall(r"(?:is|and) ([^/]+?) in /(\d)", str(caught.value))
        files = [int(file) for _, file in found]
        assert len(set(files)) == 2
        with pytest.raises(SourceError):
            merged(*(order[file] for file in files))  # the two files that it names are at odds on their own


def test_columns_set_the_order_and_extra_ones_do_not_matter() -> None:
    one = pa.schema([("a", pa.int32()), ("b", pa.string()), ("c", pa.int8())])
    two = pa.schema([("d", pa.bool_()), ("c", pa.int16()), ("a", pa.int64())])
    assert merge_schemas([("/1", one), ("/2", two)], ["c", "a"]) == pa.schema([("c", pa.int16()), ("a", pa.int64())])


def test_without_columns_all_files_must_have_the_same_ones_in_any_order() -> None:
    one = pa.schema([("a", pa.int32()), ("b", pa.string())])
    two = pa.schema([("b", pa.string()), ("a", pa.int32())])
    three = pa.schema([("a", pa.int32())])
    assert merge_schemas([("/1", one), ("/2", two)], None) == one
    assert merge_schemas([("/2", two), ("/1", one)], None) == two
    with pytest.raises(SourceError, match=r"/3 has no column 'b' as /1 has; it has a$"):
        merge_schemas([("/1", one), ("/3", three)], None)
    with pytest.raises(SourceError, match=r"/1 has a column 'b' that /3 has not.*columns="):
        merge_schemas([("/3", three), ("/1", one)], None)


def test_an_unknown_column_says_what_there_is_and_what_is_similar() -> None:
    schema = pa.schema([("user_id", pa.int32()), ("item_id", pa.int32()), ("clicks", pa.int8())])
    with pytest.raises(SourceError) as caught:
        merge_schemas([("/1", schema)], ["clicks", "userid"])
    assert str(caught.value) == "/1 has no column 'userid' (similar: user_id); it has user_id, item_id, clicks"


def test_all_missing_columns_are_named_at_once_and_what_is_close_comes_first() -> None:
    schema = pa.schema([(name, pa.int32()) for name in ("a", "price", "user_id", "item_id")])
    with pytest.raises(SourceError) as caught:
        merge_schemas([("/1", schema)], ["itemid", "a", "prize", "zzz", "itmid"])
    assert str(caught.value) == (
        "/1 has no columns 'itemid' (similar: item_id), 'prize' (similar: price), 'zzz', 'itmid' (similar: item_id); "
        "it has item_id, price, a, user_id"
    )


def test_of_several_files_the_first_that_lacks_columns_is_named() -> None:
    kinds = [pa.schema([(name, pa.int8()) for name in names]) for names in ("abcd", "adb", "a")]
    found = [(f"/{number}", kind) for number, kind in enumerate(kinds)]
    with pytest.raises(SourceError, match=r"^/1 has no column 'c'; it has a, d, b$"):
        merge_schemas(found, ["a", "b", "c"])
    with pytest.raises(SourceError, match=r"^/2 has no columns 'd', 'b'; it has a$"):
        merge_schemas(found, ["d", "b", "a"])


def test_a_wide_file_is_not_listed_whole() -> None:
    schema = pa.schema([(f"column_{number}", pa.int8()) for number in range(3_000)])
    with pytest.raises(SourceError, match=r"it has column_2999, .* and 2,900 more$") as caught:
        merge_schemas([("/1", schema)], ["colunm_2999"])
    assert len(str(caught.value)) < 2_000


def test_nullability_and_metadata() -> None:
    one = pa.schema([pa.field("a", pa.int32(), nullable=False, metadata={"k": "v"})], metadata={"pandas": "1"})
    two = pa.schema([pa.field("a", pa.int32())])
    assert merge_schemas([("/1", one)], None).equals(pa.schema([pa.field("a", pa.int32(), False)]), check_metadata=True)
    for found in ([("/1", one), ("/2", two)], [("/2", two), ("/1", one)]):
        assert merge_schemas(found, None).equals(two, check_metadata=True)


def test_two_columns_of_one_name() -> None:
    with pytest.raises(SourceError, match="/1 has more than one column 'a'"):
        merge_schemas([("/1", pa.schema([("a", pa.int32()), ("a", pa.int8())]))], None)


@pytest.mark.parametrize(
    ("columns", "reason"), [([], "empty"), (["a", "b", "a"], "twice: a, b, a"), ("ab", "not the string 'ab'")]
)
def test_lists_of_columns_that_are_refused(columns: list[str], reason: str) -> None:
    with pytest.raises(SourceError, match=reason):
        check_columns(columns)


def test_lists_of_columns_that_are_fine() -> None:
    check_columns(None)
    check_columns(("a", "b"))
