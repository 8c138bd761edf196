"""Rules that keep the code readable: short functions and files, declared members, tests in the same
tree as the source."""

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "python" / "ludic"
TESTS = REPOSITORY / "tests"
LONG_FILE_LINES = 400
MAX_LONG_FILES = 0.05
"""Share of the package's files that may be longer than `LONG_FILE_LINES`."""
MAX_FILE_LINES = 800
MAX_FUNCTION_LINES = 80
SMALL_FILE_LINES = 40
"""A shorter file with one importer, in its own folder, belongs in that importer."""
IDIOMS = {
    "those of": "repeat the noun, or use 's",
    "that of": "repeat the noun, or use 's",
    "what is": "name it",
    "so many": "this number of",
    "nobody": "no process, no query, not",
    "at once": "immediately, concurrently, atomically",
    "beside": "next to, in addition to",
    "asked for": "requested",
    "None: ": "None means",
    "in vain": "without effect",
    "shall": "must",
}
"""Words that stop a reader of this field -> the usual ones. One in 10,000 words is kept."""
PROTOCOLS = {
    "users implement it": """
        BatchCredit BatchSandbox BatchSource ChatClient CodeRunner ControlPlane Controller
        Correction CreditAssigner Evaluator ForwardPasses InferenceEngine MetricsLogger Opponent
        OutputVerifier PolicyPublisher Prompts ReferencePolicy RequestStrategy ResumableLogger
        RewardModelClient RolloutScorer Sandbox SandboxPool Task TensorCommunicator TestAdapter
        TrainingBackend TrainingLogger VersionedClient""",
    "an optional member of such an object": """
        HasActorLogps Stateful""",
    "two or more of ours": """
        Addressed CompletesTokens GroupLog RewardWeightsClient Running SamplesTokens WeightSource""",
}
"""Why each Protocol is one: otherwise a type is a class, a base class or a Callable."""
MAX_PATTERN_WORDS = 8
"""Words in a pattern that a test matches with a message. Numbers and symbols do not count."""
TEST_FOLDERS = {"core", "docs", "examples", "gpu", "integration", "support"}
"""Folders of tests/ without a counterpart in the package: the Rust core, pages, scripts, real
servers, GPUs and shared support."""
FOREIGN_OBJECTS = {
    "agents": "a user's function",
    "cli": "the standard library of this platform",
    "distributed": "a user's chat client and engine",
    "envs": "foreign environments and their values, a user's runner, the standard library of this platform",
    "eval": "a user's argparse.Namespace",
    "files": "numpy and torch",
    "images": "an image of a user, an array or one of Pillow",
    "inference": "transformers, PEFT, torch, openai, vLLM and a tokenizer",
    "interaction": "a user's agent and environment",
    "models": "transformers, PEFT, bitsandbytes and wrappers of torch",
    "recipes": "a user's function",
    "rollouts": "a user's backend, environment, buffer, logger and engine, numpy and torch",
    "runs": "a tokenizer, a model and a config of transformers, a user's curriculum",
    "tasks": "a user's reward function",
    "trainers": "a user's function",
    "training": "a user's reward, loss, filter and environment, transformers, torch, wandb and the C library",
    "types.py": "the value of a field, a list of a user's or an array",
    "user_objects.py": "a user's module, and a user's object, adapted",
}
"""Packages that may read optional members, and the foreign objects that they read them from. Our
own types declare every member."""


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_no_file_exceeds_the_line_limit():
    folders = ["crates/*/src", "benches", "tests/support"]
    others = [path for folder in folders for kind in ("rs", "py") for path in sorted(REPOSITORY.glob(f"{folder}/**/*.{kind}"))]
    assert {REPOSITORY / "benches" / "src" / "lib.rs", Path(__file__).with_name("support") / "stub_vllm.py"} < set(others)
    sources = [*python_files(), *others]
    assert len(sources) > 400
    lengths = {str(path.relative_to(REPOSITORY)): len(path.read_text(encoding="utf-8").splitlines()) for path in sources}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_few_files_are_long():
    files = python_files()
    long = [path for path in files if len(path.read_text(encoding="utf-8").splitlines()) > LONG_FILE_LINES]
    assert len(long) <= MAX_LONG_FILES * len(files)


def test_no_function_exceeds_the_line_limit():
    lengths = {
        f"{path.relative_to(PACKAGE)}:{function.name}": function.end_lineno - function.lineno + 1
        for path in python_files()
        for function in functions_of(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(lengths) > 1000
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FUNCTION_LINES} == {}


def test_no_small_file_is_imported_by_one_file_of_its_folder_alone():
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in python_files()}
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for imported in imports_of(ast.parse(path.read_text(encoding="utf-8"))) & modules.keys():
            importers[imported].add(name)
    sizes = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules.items()}
    small = {
        name: importer
        for name, (importer, *others) in ((name, sorted(found)) for name, found in importers.items() if found)
        if not others and sizes[name] < SMALL_FILE_LINES and modules[name].parent == modules[importer].parent
    }
    assert sum(map(len, importers.values())) > 1000
    # An `__init__` that imports a file makes it public: users are its other importers.
    assert {name: importer for name, importer in small.items() if not importer.endswith("__init__")} == {}


def imports_of(tree: ast.Module) -> set[str]:
    """Every name that an import may take from a module or package."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    return names


def test_every_protocol_has_a_reason():
    found = Counter(
        node.name
        for path in python_files()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).startswith("Protocol") for base in node.bases)
    )
    assert set(found) == {name for names in PROTOCOLS.values() for name in names.split()}


def prose_of(source: str) -> Iterator[str]:
    """The docstrings and comments of a file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield " ".join(node.value.value.split())
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def test_docstrings_and_comments_have_the_words_of_the_field():
    prose = [text for path in python_files() for text in prose_of(path.read_text(encoding="utf-8"))]
    words = sum(len(text.split()) for text in prose)
    assert words > 100_000
    found = Counter(idiom for idiom in IDIOMS for text in prose for _ in re.finditer(rf"(?i)\b{idiom}", text))
    assert {idiom: (count, IDIOMS[idiom]) for idiom, count in found.items() if count * 10_000 > words} == {}


def test_the_check_of_words_sees_docstrings_and_comments():
    source = '"""Weights\nthose\nof a run."""\nx = 1  # what is left\n'
    assert list(prose_of(source)) == ["Weights those of a run.", "# what is left"]


def test_every_test_folder_mirrors_a_folder_of_the_package():
    folders = {path.parent.relative_to(REPOSITORY / "tests") for path in (REPOSITORY / "tests").rglob("test_*.py")}
    packages = {path.parent.relative_to(PACKAGE) for path in python_files()}
    assert {str(folder) for folder in folders - packages if folder.parts[0] not in TEST_FOLDERS} == set()


def longest_pattern(tree: ast.Module) -> int:
    """The number of words in the longest literal given as `match=`."""
    given = [node.value for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "match"]
    parts = [[part.value for part in ast.walk(value) if isinstance(part, ast.Constant)] for value in given]
    words = [re.split(r"\s|\.\*", "".join(map(str, texts))) for texts in parts]
    return max((sum(bool(re.search(r"[A-Za-z]{2}", word)) for word in each) for each in words), default=0)


def test_messages_are_matched_by_names_and_values_and_not_by_sentences():
    tests = {str(path.relative_to(TESTS)): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(TESTS.rglob("*.py"))}
    assert max(map(longest_pattern, tests.values())) > 5
    assert {name for name, tree in tests.items() if longest_pattern(tree) > MAX_PATTERN_WORDS} == set()


def test_the_check_of_patterns_counts_words():
    assert longest_pattern(ast.parse(r"raises(E, match=rf'lr \(0\) .*at least {a}' '.*raise it'); f(match='one')")) == 5


def optional_reads(tree: ast.Module) -> int:
    """`getattr` with a default, and `hasattr`."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return sum(call.func.id == "hasattr" or (call.func.id == "getattr" and len(call.args) == 3) for call in calls)


def test_optional_members_are_read_only_from_foreign_objects():
    reading = {
        path.relative_to(PACKAGE).parts[0]
        for path in python_files()
        if optional_reads(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert reading == set(FOREIGN_OBJECTS)


def test_the_check_detects_optional_reads():
    assert optional_reads(ast.parse("getattr(a, 'b', None) or hasattr(c, 'd') or getattr(e, 'f')")) == 2
