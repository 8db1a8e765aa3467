"""The one file that reads private attributes of the product's objects; each says why."""

from worker_client.communicators.communicator import FlatCommunicator


def communicator(client):
    """The driver in it says what is on the way, of which callers see the end alone."""
    return client._ordered


def rail(client):
    """What a node's rank does between nodes, which its callers see the end of alone."""
    return client._ordered.inner


def send(node):
    """What starts an all-reduce between nodes, at instants that no caller knows."""
    return node._send


def flat(client):
    """What moves the all-reduces of a client on now, and what decides for it."""
    found = communicator(client)
    while not isinstance(found, FlatCommunicator):
        found = found.inner
    return found


def loop(transport):
    """A transport joins an end once by itself."""
    return transport._loop


def blocks(client):
    """Page-locked memory that is never given back would show only when there is none left."""
    ((_, blocks),) = client._staging._devices.values()
    return blocks


def connections(guard):
    """No peer can ask for what the guard knows of a connection."""
    return guard._connections


def away(engine):
    """Peers that may still come back are told of to nobody."""
    return engine._unreachable


def fragments(outer):
    """Their checkpoint would wait for the averaging that is on its way."""
    return [(each._number, each._made, each.outer, each._velocity) for each in outer._fragments]
