"""The two images, built once."""

import pytest

from tests.containers import images


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """Skip where images can neither be built nor run."""
    try:
        images.check_tools()
        for name in images.DEBIAN:
            images.make_base(name, tmp_path_factory.mktemp("base"))
    except images.Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def reducer_image(base, tmp_path_factory):
    return images.build("reducer", tmp_path_factory.mktemp("reducer"))


@pytest.fixture(scope="session")
def worker_image(base, tmp_path_factory):
    return images.build("worker", tmp_path_factory.mktemp("worker"))
