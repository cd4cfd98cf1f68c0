"""Hold the repository's rules: imports, budgets, and a README that tells the truth.

Covers every script at the top level, whichever there are.
"""

import ast
import functools
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
SCRIPTS = sorted(path.name for path in ROOT.glob("*.py"))
MODULES = {name.removesuffix(".py") for name in SCRIPTS}
each_script = pytest.mark.parametrize("script", SCRIPTS)

MAX_FUNCTION_LINES, MAX_FILE_LINES, MAX_PRODUCT_LINES, MAX_COLUMNS = 60, 530, 5_250, 100

# What a script may import of ours: leaves import nothing, parts import leaves (and `decode`
# also `align`), and the rest is as listed. A script that no row knows must be a leaf.
LEAVES = {"cpu_kernels", "host_memory", "chunk_audio", "tokenizer", "model", "stitch"}
PARTS = {
    "quantize": {"model", "convert_hf_checkpoint", "cpu_kernels"},  # the same files
    "kv_cache": {"cpu_kernels", "model", "quantize"},
    "align": {"model", "stitch", "tokenizer"},
    "decode": {"align", "chunk_audio", "model", "stitch", "tokenizer"},
    "quality": {"chunk_audio", "stitch"},
    "compile_step": {"cpu_kernels", "decode", "model"},
    "long_audio": {
        *("chunk_audio", "compile_step", "decode", "model", "quality", "stitch", "tokenizer")
    },
}
MAY_IMPORT = {
    **{name: set() for name in LEAVES},
    **PARTS,
    "convert_hf_checkpoint": {"ct2_reader", "model", "tokenizer"},
    "rivals": {"host_memory"},
    "generate": {*LEAVES, *PARTS, "leaf", "convert_hf_checkpoint"},
    "eval": {*LEAVES, *PARTS, "leaf", "generate", "rivals"},
    "benchmark": {*LEAVES, *PARTS, "leaf", "generate", "rivals", "eval"},
}
# Imports inside functions, each with its reason.
LATE_IMPORTS = {
    ("tokenizer.py", "sentencepiece"),  # protobuf module, only the writer of a tokenizer needs it
    ("convert_hf_checkpoint.py", "huggingface_hub"),  # slow to import, only downloads need it
    ("host_memory.py", "resource"),  # Windows has none
    ("compile_step.py", "torch"),  # the compiler, slow and large to import
    ("cpu_kernels.py", "torch"),  # the extension builder changes sys.path
    ("rivals.py", "faster_whisper"),  # needed only where compared with
    ("rivals.py", "pywhispercpp"),
    ("rivals.py", "transformers"),
    ("rivals.py", "whisper"),
}
DEV_ONLY = {
    *("whisper", "transformers", "tiktoken", "jiwer", "faster_whisper", "librosa", "pytest"),
    "pywhispercpp",
}
# The scripts that measure quality need a word error rate; nobody who only transcribes runs them.
_SCORES = {"jiwer", "whisper", "tiktoken"}
DEV_ALLOWED = {"eval.py": _SCORES, "benchmark.py": _SCORES}
# Import name -> name in requirements.txt, where they differ.
PACKAGE_NAMES = {"google": "protobuf"}


@functools.cache
def tree(script: str) -> ast.Module:
    return ast.parse((ROOT / script).read_text(encoding="utf-8"), script)


def imported_names(node: ast.AST) -> list[str]:
    """Top-level module names that an import statement names; [""] for a relative import."""
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [""] if node.level else [(node.module or "").split(".")[0]]
    return []


def imports(script: str) -> set[str]:
    return {name for node in ast.walk(tree(script)) for name in imported_names(node)}


def test_there_are_scripts():
    assert {"chunk_audio.py", "generate.py", "model.py", "tokenizer.py"} <= set(SCRIPTS)


# ---- importing does nothing but define -----------------------------------------------------------

# Imports torch once, then forks a child for each script, which imports it with some packages
# blocked and writes what it saw to <folder>/<script>.json.
PROBE = """
import json, logging, os, random, sys, traceback
import numpy, torch, torch._dynamo.config, torch._inductor.config

folder, blocked_packages = sys.argv[1], json.loads(sys.argv[2])

class Blocker:
    def __init__(self, blocked):
        self.blocked = blocked
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.blocked:
            raise ModuleNotFoundError(f"{name} is blocked by the test", name=name)

def configuration(module):
    return {key: repr(value) for key, value in module.get_config_copy().items()}

def state():
    loggers = [logging.getLogger(), logging.getLogger("torch")]
    return {
        "dynamo config": configuration(torch._dynamo.config),
        "inductor config": configuration(torch._inductor.config),
        "environment": dict(os.environ),
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "torch rng": hash(repr(torch.get_rng_state().tolist())),
        "random rng": hash(repr(random.getstate())),
        "numpy rng": hash(repr(numpy.random.get_state())),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        "cudnn": [torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic],
        "handlers": [[*map(repr, logger.handlers), logger.level] for logger in loggers],
        "sys.path": list(sys.path),
        "excepthook": repr(sys.excepthook),
    }

def probe(script):
    seen = {"error": "", "before": state()}
    try:
        __import__(script.removesuffix(".py"))
    except BaseException:
        seen["error"] = traceback.format_exc()
    return seen | {"after": state()}

for script, blocked in blocked_packages.items():
    if os.fork() == 0:
        output = os.open(f"{folder}/output", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        assert not set(blocked) & set(sys.modules)
        sys.meta_path.insert(0, Blocker(blocked))
        seen = probe(script)
        sys.stdout.flush(), sys.stderr.flush()
        seen["printed"] = open(f"{folder}/output").read()
        with open(f"{folder}/{script}.json", "w") as file:
            json.dump(seen, file)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> dict[str, dict]:
    """What each script's import did, in a process of its own."""
    folder = tmp_path_factory.mktemp("imports")
    blocked = {script: sorted(DEV_ONLY - DEV_ALLOWED.get(script, set())) for script in SCRIPTS}
    command = [sys.executable, "-B", "-c", PROBE, str(folder), json.dumps(blocked)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    return {s: json.loads((folder / f"{s}.json").read_text(encoding="utf-8")) for s in SCRIPTS}


@each_script
def test_imports_with_only_the_base_dependencies(script, imported):
    assert not imported[script]["error"], imported[script]["error"]


@each_script
def test_import_leaves_global_state_alone(script, imported):
    """Importing gpt-fast's quantize.py changes the compiler's settings for the whole process."""
    seen = imported[script]
    if seen["error"]:
        pytest.skip("does not import, see test_imports_with_only_the_base_dependencies")
    assert not seen["printed"]
    before, after = seen["before"], seen["after"]
    for key in ("dynamo config", "inductor config", "environment"):
        changed = {k: v for k, v in after[key].items() if before[key].get(k) != v}
        assert not changed and before[key].keys() == after[key].keys(), (key, changed)
    assert before == after


def is_definition(node: ast.stmt) -> bool:
    kinds = (ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.FunctionDef, ast.ClassDef)
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "__name__ == '__main__'"
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, kinds) or is_docstring


@each_script
def test_the_top_level_only_defines(script):
    lines = [node.lineno for node in tree(script).body if not is_definition(node)]
    assert not lines, f"{script} does something on import, in lines {lines}"


# ---- import graph --------------------------------------------------------------------------------


@each_script
def test_import_graph(script):
    name = script.removesuffix(".py")
    leaves = {m for m in MODULES if not imports(f"{m}.py") & (MODULES - {m})}
    allowed = MAY_IMPORT.get(name, set())  # a script that no rule knows must be a leaf
    allowed = allowed | (leaves if "leaf" in allowed else set())
    ours = imports(script) & MODULES
    assert ours <= allowed, f"{script} imports {sorted(ours - allowed)}"
    assert "" not in imports(script), "relative import"


def test_import_graph_has_no_cycle():
    left = {m: imports(f"{m}.py") & MODULES for m in MODULES}
    while free := [m for m, needs in left.items() if not needs & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"a cycle among {sorted(left)}"


@each_script
def test_imports_stand_at_the_top(script):
    at_top = {id(node) for node in tree(script).body}
    late = {
        (script, name)
        for node in ast.walk(tree(script))
        if id(node) not in at_top
        for name in imported_names(node)
    }
    assert late <= LATE_IMPORTS, "an import inside a function must be listed with its reason"
    source = (ROOT / script).read_text(encoding="utf-8")
    assert not re.search(r"sys\.path\b|import_module\(|__import__\(", source)


@each_script
def test_imports_are_requirements(script):
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    required = {re.match(r"[\w-]+", line)[0] for line in text.splitlines() if line[:1].isalpha()}
    optional = DEV_ALLOWED.get(script, set()) | {n for name, n in LATE_IMPORTS if name == script}
    others = imports(script) - MODULES - set(sys.stdlib_module_names) - (optional & DEV_ONLY)
    packages = {PACKAGE_NAMES.get(name, name) for name in others}
    assert packages <= required, f"{sorted(packages - required)} not in requirements.txt"


# ---- budgets -------------------------------------------------------------------------------------


def n_lines(script: str) -> int:
    return len((ROOT / script).read_text(encoding="utf-8").splitlines())


@each_script
def test_functions_are_short(script):
    long = {
        node.name: length
        for node in ast.walk(tree(script))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := node.end_lineno - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not long, f"longer than {MAX_FUNCTION_LINES} lines: {long}"


@each_script
def test_file_is_short(script):
    assert n_lines(script) <= MAX_FILE_LINES


def test_product_is_small():
    total = sum(map(n_lines, SCRIPTS))
    assert total <= MAX_PRODUCT_LINES


@pytest.mark.parametrize("path", [*SCRIPTS, *(f"tests/{p.name}" for p in ROOT.glob("tests/*.py"))])
def test_lines_are_short(path):
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    assert not [number for number, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS]


# ---- README --------------------------------------------------------------------------------------

needs_readme = pytest.mark.skipif(not README.exists(), reason="README.md does not exist yet")


def readme_text() -> str:
    return README.read_text(encoding="utf-8")


def code_lines(text: str) -> list[str]:
    """Lines of fenced code blocks, continued lines joined."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join(blocks).replace("\\\n", " ").splitlines()


def python_commands(text: str) -> list[list[str]]:
    """Words of each `python <script>` command, from code blocks and from inline code."""
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    commands = []
    for line in code_lines(text) + inline:
        match = re.search(r"\bpython3? +([\w./-]+\.py\b.*)", line)
        if match:
            commands.append(shlex.split(re.split(r" [|>] | && ", match[1])[0], comments=True))
    return commands


@functools.cache
def help_text(script: str) -> str:
    result = subprocess.run(
        [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def unknown_flags(words: list[str]) -> list[str]:
    known = set(re.findall(r"(?<![\w-])--?[a-zA-Z][\w-]*", help_text(words[0])))
    flags = [word.split("=")[0] for word in words[1:] if re.match(r"--?[a-zA-Z]", word)]
    return [flag for flag in flags if flag not in known]


def test_the_readers_of_the_readme_read():
    """The helpers below find commands and wrong flags, in a README made up for it."""
    text = (
        "a `python generate.py --audio x` b\n```\n$ python3 generate.py \\\n --nope 3 | cat\n```\n"
    )
    commands = python_commands(text)
    assert commands == [["generate.py", "--nope", "3"], ["generate.py", "--audio", "x"]]
    assert [unknown_flags(words) for words in commands] == [["--nope"], []]


@needs_readme
def test_readme_commands_exist():
    commands = python_commands(readme_text())
    assert commands, "the README names no command"
    for words in commands:
        assert (ROOT / words[0]).is_file(), f"README names {words[0]}"
        assert not unknown_flags(words), f"README: {' '.join(words)}"


@needs_readme
def test_readme_has_the_test_command():
    """`.ci/run` takes the command that follows the mark."""
    match = re.search(r"<!-- test -->\s*```[^\n]*\n(.*?)```", readme_text(), re.DOTALL)
    assert match and "pytest" in match[1]
    assert re.search(r"^pip install", match[1], re.MULTILINE)


@needs_readme
def test_readme_line_count_is_true():
    stated = [int(n.replace(",", "")) for n in re.findall(r"(\d[\d,]*) lines", readme_text())]
    total = sum(map(n_lines, SCRIPTS))
    for count in stated:
        if count >= 1000:  # smaller ones are about something else
            assert abs(count - total) <= 0.05 * total, f"README says {count}, it is {total}"


def test_no_path_of_a_machine():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    if listed.returncode:
        pytest.skip("not a git checkout")
    pattern = re.compile(r"(?<![\w.-])(/(?:work|home|root|Users|mnt|scratch)/\w|[A-Z]:\\Users)")
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            found = pattern.search((ROOT / name).read_bytes().decode("utf-8", errors="ignore"))
            assert not found, f"{name} holds {found[0]}..."
