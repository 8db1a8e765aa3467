"""The mutator: which changes it finds, and that they are the same ones tomorrow."""

import pytest

from tests.kill_matrix.mutants import candidates, in_order

PYTHON = '''
LIMIT = 3


class Window:
    """At most 3 at once."""

    def take(self, size, *, least=1):
        """Take some, if there are 2."""
        # if size > 4: nothing
        if size > self.free and (size
                                 or least):
            self.refuse("é", f"{size + 1}")
        log.debug("taken")
        return min(self.free,
                   size) if isinstance(size, int) else 7
'''
CYTHON = '''
cdef extern from "window.h":
    int window_take(window *, size_t size)

cdef class Window:
    cdef take(self, size_t size,
              bint least=False):
        """Take some, if there are 2."""
        if size >= self.free:  # 4 (at least)
            self.refuse("if (a):", size)
        return <long>size

cdef inline int free(window *its) noexcept nogil:
    return its.size + 1
'''
C = """
#define LIMIT 3
struct window *window_new(unsigned size, /* 4 */
                          struct pool *pool)
{
    struct window *window = take(pool, size); /* if (a) b(1, 2); */
    if (window != NULL && (size < LIMIT || first(window)))
        window_set(window, "a, (b", size);
    return window->next ? window : other(window->next->one, 0x10);
}
"""


# Function, kind and the line that comes of it.
IN_PYTHON = """
Window.take | negated branch    | if not (size > self.free and (size
Window.take | negated branch    | size) if not (isinstance(size, int)) else 7
Window.take | off by one        | if size >= self.free and (size
Window.take | off by one        | size) if isinstance(size, int) else 8
Window.take | dropped call      | pass
Window.take | swapped arguments | self.refuse(f"{size + 1}", "é")
Window.take | swapped arguments | return min(size,
Window.take | swapped arguments | size) if isinstance(int, size) else 7
"""
IN_CYTHON = """
take | negated branch    | if not (size >= self.free): # 4 (at least)
take | off by one        | if size > self.free: # 4 (at least)
take | dropped call      | pass
take | swapped arguments | self.refuse(size, "if (a):")
free | off by one        | return its.size + 2
"""
IN_C = """
window_new | swapped arguments | struct window *window = take(size, pool); /* if (a) b(1, 2); */
window_new | negated branch    | if (!(window != NULL && (size < LIMIT || first(window))))
window_new | off by one        | if (window != NULL && (size <= LIMIT || first(window)))
window_new | dropped call      | ;
window_new | swapped arguments | window_set("a, (b", window, size);
window_new | swapped arguments | return window->next ? window : other(0x10, window->next->one);
"""


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [("a.py", PYTHON, IN_PYTHON), ("a.pyx", CYTHON, IN_CYTHON), ("a.c", C, IN_C)],
)
def test_each_kind_is_found_in_function_bodies_alone(file, source, expected):
    found = [f"{one.function} | {one.kind:17} | {one.after}" for one in candidates(file, source)]
    assert sorted(found) == sorted(expected.strip().splitlines())


def test_the_same_ones_are_chosen_when_other_lines_change():
    before = [one.identity for one in in_order({"a.py": PYTHON, "a.c": C})]
    assert len({identity[2] for identity in before[:4]}) == 4, "each kind has its turn"
    longer = PYTHON.replace("LIMIT = 3", "LIMIT = 3\nMORE = (4, 5)\n\n\ndef more():\n    pass")
    assert [one.identity for one in in_order({"a.py": longer, "a.c": C})] == before
    other = in_order({"a.py": PYTHON.replace("else 7", "else 9"), "a.c": C})
    after = [one.identity for one in other if "9" not in one.before]
    assert after == [one for one in before if "7" not in one[3]]
