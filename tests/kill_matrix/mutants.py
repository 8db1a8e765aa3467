"""Finds small bugs that a source may be given: in Python, Cython and C."""

import ast
import hashlib
import re
from collections import defaultdict
from typing import NamedTuple

# By room: which of its files are changed.
ROOMS = {
    "reducer/engine": (".py", ".pyx", ".c"),
    "worker_client/protocol": (".py", ".pyx", ".c"),
    "worker_client/communicators": (".py",),
    "worker_client/outer": (".py",),
    "worker_client/runtime": (".pyx", ".c"),
    "reducer/runtime": (".pyx", ".c"),
    "reducer/zmtp": (".pyx", ".c"),
}
BY_ROOM = 29
COMPILED = (".c", ".h", ".pyx", ".pxd")
NEGATED, SHIFTED = "negated branch", "off by one"
DROPPED, SWAPPED = "dropped call", "swapped arguments"
SHIFTS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
# What is said for people alone, and what reads like a call and is none.
UNTESTED = ("log.", "logger.", "logging.", "warnings.")
WORDS = {"if", "for", "while", "switch", "return", "sizeof", "elif", "and", "or", "not", "in"}

COMMENTS_OF_C = r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*'"
COMMENTS_OF_CYTHON = r'""".*?"""|#[^\n]*|"(?:\\.|[^"\\\n])*"|' + r"'(?:\\.|[^'\\\n])*'"
FUNCTION_OF_C = r"^[A-Za-z_][\w\s*]*?\b(\w+)\([^;{}]*\)\n\{\n(.*?)^\}"
FUNCTION_OF_CYTHON = (
    r"^([ ]*)(?:cdef|cpdef|def)\b[^\n=]*?\b(\w+)\((?:[^\n]*\n)*?[^\n]*:[ ]*\n"
    r"((?:\1[ ]+[^\n]*\n|[ ]*\n)+)"
)


class Mutant(NamedTuple):
    """One bug."""

    file: str  # or the list that has it, for a bug that was planted by hand
    function: str  # or method with its class; or the name in that list
    kind: str
    before: str  # the line that changes
    after: str
    edits: tuple[tuple[str, int, int, str], ...] = ()  # file, from, to, and what comes there
    plant: str = ""  # the list and the name of what breaks a rule in the running process

    @property
    def identity(self):
        """What stays the same when other lines change."""
        return self[:5]

    @property
    def is_compiled(self):
        return any(file.endswith(COMPILED) for file, *_ in self.edits)

    @property
    def room(self):
        return "planted" if self.kind == "planted" else self.file.rpartition("/")[0]


def changed(text, edits):
    """Return a file's text with the edits made; the last one first, so that places stay."""
    for _, start, end, instead in sorted(edits, reverse=True):
        text = text[:start] + instead + text[end:]
    return text


def candidates(file, text):
    """Return all mutants of a file, each line's change once."""
    if file.endswith(".py"):
        found = in_python(text)
    elif file.endswith(".c"):
        found = in_tokens(text, blank(text, COMMENTS_OF_C), c=True)
    else:
        found = in_tokens(text, blank(text, COMMENTS_OF_CYTHON), c=False)
    mutants = {}
    for function, kind, *change in found:
        edit = (file, *change)
        before, after = (line_at(one, change[0]) for one in (text, changed(text, [edit])))
        if before != after:
            mutant = Mutant(file, function, kind, before, after, (edit,))
            mutants.setdefault(mutant.identity, mutant)
    return list(mutants.values())


def line_at(text, place):
    return " ".join(text[text.rfind("\n", 0, place) + 1 :].partition("\n")[0].split())


def in_order(sources):
    """Return all mutants of files, by their texts, in the order in which they are chosen.

    It is the same for those whose lines have not changed, and each kind has its turn.
    """
    by_kind = defaultdict(list)
    for file, text in sources.items():
        for mutant in candidates(file, text):
            by_kind[mutant.kind].append(mutant)
    ranked = []
    for kind, mutants in by_kind.items():
        mutants.sort(key=lambda one: hashlib.sha256(repr(one.identity).encode()).digest())
        ranked += [(place, kind, mutant) for place, mutant in enumerate(mutants)]
    return [mutant for *_, mutant in sorted(ranked, key=lambda one: one[:2])]


def in_python(text):
    """Yield function, kind, start, end and what stands there instead."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line, column):  # columns are counted in bytes
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    def span(node):
        begin = place(node.lineno, node.col_offset)
        return begin, place(node.end_lineno, node.end_col_offset)

    def text_of(node):
        begin, end = span(node)
        return text[begin:end]

    def walk(node, names, *, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                below = inside or not isinstance(child, ast.ClassDef)
                yield from walk(ast.Module(child.body, []), (*names, child.name), inside=below)
            elif not isinstance(child, ast.JoinedStr):  # whose places are wrong before 3.12
                for change in changes_of(child, text, span, text_of) if inside else ():
                    yield ".".join(names), *change
                yield from walk(child, names, inside=inside)

    yield from walk(ast.parse(text), (), inside=False)


def changes_of(node, text, span, text_of):
    match node:
        case ast.If(test=test) | ast.IfExp(test=test):
            yield NEGATED, *span(test), f"not ({text_of(test)})"
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            yield SHIFTED, *span(node), str(value + 1)
        case ast.Compare(left=left, comparators=[right]):
            begin, end = span(left)[1], span(right)[0]
            if sign := re.fullmatch(r"[\s)]*([<>]=?)[\s(]*", text[begin:end]):
                yield SHIFTED, begin + sign.start(1), begin + sign.end(1), SHIFTS[sign[1]]
        case ast.Expr(value=ast.Call() as call) if not text_of(call).startswith(UNTESTED):
            yield DROPPED, *span(node), "pass"
        case ast.Call(args=[first, second, *_]) if not isinstance(second, ast.Starred):
            one, other = text_of(first), text_of(second)
            if one != other and not isinstance(first, ast.Starred):
                (begin, middle), (until, end) = span(first), span(second)
                yield SWAPPED, begin, end, other + text[middle:until] + one


def blank(text, patterns):
    """Return the text with spaces for comments and strings, so that all places stay."""
    return re.sub(patterns, lambda one: re.sub(r"[^\n]", " ", one[0]), text, flags=re.DOTALL)


def in_tokens(text, code, *, c):
    """Yield function, kind, start, end and what stands there instead."""
    pattern = FUNCTION_OF_C if c else FUNCTION_OF_CYTHON
    flags = re.MULTILINE | (re.DOTALL if c else 0)
    for function in re.finditer(pattern, code, flags):
        name = function[1 if c else 2]
        begin, end = function.span(2 if c else 3)
        yield from ((name, *change) for change in changes_in(text, code, begin, end, c=c))


def changes_in(text, code, begin, end, *, c):
    def found(pattern):
        return re.compile(pattern, re.MULTILINE).finditer(code, begin, end)

    if c:
        for branch in found(r"\bif \("):
            close = closing(code, branch.end() - 1)
            yield NEGATED, branch.end(), close, f"!({text[branch.end() : close]})"
    else:
        for branch in found(r"^ *(?:el)?if (.*[^(]): *$"):
            yield NEGATED, *branch.span(1), f"not ({text[slice(*branch.span(1))]})"
    for number in found(r"(?<![\w.])\d+(?![\w.])"):
        yield SHIFTED, *number.span(), str(int(number[0]) + 1)
    for sign in found(r"(?<= )[<>]=?(?= )"):
        yield SHIFTED, *sign.span(), SHIFTS[sign[0]]
    for call in found(r"^ +(\w[\w.>-]*(\().*\);)[ ]*$" if c else r"^ +(\w[\w.]*(\().*\))[ ]*$"):
        last = call.end(1) - (2 if c else 1)
        if closing(code, call.start(2)) == last and not call[1].startswith(UNTESTED):
            yield DROPPED, *call.span(1), ";" if c else "pass"
    for call in found(r"\b(\w+)\("):
        if call[1] not in WORDS:
            yield from swaps(text, code, call.end() - 1)


def swaps(text, code, opening):
    """Yield the change that swaps the first two arguments of a call, if they differ."""
    close, depth, commas = closing(code, opening), 0, []
    for place in range(opening + 1, close):
        depth += (code[place] in "([{") - (code[place] in ")]}")
        if code[place] == "," and depth == 0:
            commas.append(place)
    if commas:
        first, second = opening + 1, commas[0] + 1
        end = [*commas, close][1]
        second += len(text[second:end]) - len(text[second:end].lstrip())
        one, other = text[first : commas[0]], text[second:end]
        if one.strip() != other.strip() and "=" not in one + other:
            yield SWAPPED, first, end, other + text[commas[0] : second] + one


def closing(code, opening):
    """Return where the parenthesis ends that is opened there."""
    depth = 0
    for place in range(opening, len(code)):
        depth += (code[place] == "(") - (code[place] == ")")
        if depth == 0:
            return place
    return len(code)
