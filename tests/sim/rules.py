"""Rules that are broken on purpose: a simulator that does not notice would show nothing."""

import traceback
from contextlib import contextmanager
from itertools import count, islice
from unittest.mock import patch

ENOUGH = 200  # one of so many worlds notices a broken rule
STORY_LINES = 60  # the last ones


class Mutations(dict):
    """By name, where a rule is, what it is called there, and what replaces it.

    Args:
        world: makes the world of a seed, in which the rules hold that are broken here.
    """

    def __init__(self, world):
        super().__init__()
        self._world = world
        self._where = {}

    def instead_of(self, owner, rule, where=None):
        """Have a function replace a rule, with that as its first argument; its name is of both.

        Args:
            owner, rule: the class or module, and the attribute's name.
            where: says of a world whether it has what the rule is about; None: each has.
        """

        def register(mutation):
            sound = getattr(owner, rule)

            def mutated(*args, **kwargs):
                return mutation(sound, *args, **kwargs)

            name = mutation.__name__.replace("_", "-")
            self[name] = owner, rule, mutated
            self._where[name] = where
            return mutation

        return register

    @contextmanager
    def broken(self, name):
        with patch.object(*self[name]):
            yield

    def first_caught(self, name, worlds=ENOUGH):
        """Return the first seed whose world notices a mutation, and how; None if none does."""
        where = self._where.get(name) or bool
        with self.broken(name):
            made = ((seed, self._world(seed)) for seed in count())
            asked = islice((one for one in made if where(one[1])), worlds)
            stories = ((seed, story_of(world)) for seed, world in asked)
            return next(((seed, story) for seed, story in stories if story), None)


def story_of(world):
    """Run a world; return the story of what went wrong, or nothing."""
    try:
        world.run()
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the seed's outcome)
        trace = traceback.format_exc()[-1500:]
        return "\n".join([repr(error), *world.describe()[-STORY_LINES:], trace])
    return ""


def check(world, seeds, allowed=None):
    """Run worlds; one of them may end with the error that is allowed."""
    excused = []
    for seed in seeds:
        story = story_of(world(seed))
        if allowed is not None and story.startswith(allowed.__name__):
            excused.append(seed)
        else:
            assert not story, f"seed {seed}: {story}"
    assert len(excused) <= 1, excused


def check_notices(world, mutations, name):
    caught = mutations.first_caught(name)
    assert caught is not None, f"not noticed by {ENOUGH} worlds"
    check(world, [caught[0]])
