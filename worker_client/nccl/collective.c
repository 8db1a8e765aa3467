#include "collective.h"

#include <stdlib.h>
#include <string.h>

#include "interfaces.h"
#include "interpreter.h"
#include "plugin.h"
#include "worker_client/runtime/core.h"

enum {
    REQUESTS = 64, /* NCCL has 8 of one operation in flight, and few operations at a time */
    WORDS_BYTES = 512,
    READ_ONLY = 0x100, /* PyBUF_READ */
};

/* A reducer's codes (constants.py, `DType` and `ReduceOp`) by NCCL's; 0: it has none. */
static const uint8_t DTYPES[] = {5, 8, 6, 0, 7, 0, 3, 1, 2, 4};
static const uint8_t OPS[] = {1, 5, 4, 3};

struct listener {
    PyObject *object; /* of bridge.py; NULL: it has connected, or could not */
};

struct request {
    struct communicator *of;
    struct all_reduce asked;
    bool taken;
    char why[WORDS_BYTES]; /* it has failed */
};

struct communicator {
    PyObject *object; /* of bridge.py */
    const struct core_calls *calls;
    double timeout_s;
    struct totals {
        uint64_t all_reduces, bytes; /* that ended well; bridge.py reads both */
    } totals;
    struct request requests[REQUESTS];
};

int collective_devices(int *count)
{
    *count = 1;
    return NCCL_SUCCESS;
}

int collective_supports(int dtype, int op, int *supported)
{
    bool known = dtype >= 0 && (size_t)dtype < sizeof DTYPES && op >= 0 && (size_t)op < sizeof OPS;
    *supported = known && DTYPES[dtype] != 0;
    return NCCL_SUCCESS;
}

/* -- setting up ------------------------------------------------------------------------------ */

int collective_listen(int device, void *handle, void **listener)
{
    int state;
    const struct interface *way = interfaces_get(device);
    struct listener *made = way == NULL ? NULL : calloc(1, sizeof *made);
    const struct interpreter *python = made == NULL ? NULL : interpreter_enter(&state);
    if (python == NULL) {
        free(made);
        return NCCL_SYSTEM_ERROR;
    }
    PyObject *bridge = python->PyImport_ImportModule("worker_client.nccl.bridge"), *said = NULL;
    if (bridge != NULL)
        made->object = python->PyObject_CallMethod(bridge, "listen", "s", way->text);
    if (made->object != NULL)
        said = python->PyObject_GetAttrString(made->object, "handle");
    char *bytes = said == NULL ? NULL : python->PyBytes_AsString(said);
    if (bytes != NULL)
        memcpy(handle, bytes, NCCL_HANDLE_BYTES);
    else
        interpreter_log_error(python, "all-reduces do not go through reducers");
    python->Py_DecRef(said);
    python->Py_DecRef(bridge);
    if (bytes == NULL)
        python->Py_DecRef(made->object);
    interpreter_leave(python, state);
    if (bytes == NULL) {
        free(made);
        return NCCL_SYSTEM_ERROR;
    }
    *listener = made;
    return NCCL_SUCCESS;
}

/* Joins the job. False: Python has raised why not. */
static bool join(const struct interpreter *python, struct communicator *made, void *handles[],
                 int ranks, int rank, PyObject *listening)
{
    PyObject *all = python->PyBytes_FromStringAndSize(NULL, (ssize_t)ranks * NCCL_HANDLE_BYTES);
    if (all == NULL)
        return false;
    for (int at = 0; at < ranks; at++)
        memcpy(python->PyBytes_AsString(all) + (size_t)at * NCCL_HANDLE_BYTES, handles[at],
               NCCL_HANDLE_BYTES);
    PyObject *totals =
        python->PyMemoryView_FromMemory((char *)&made->totals, sizeof made->totals, READ_ONLY);
    made->object = python->PyObject_CallMethod(listening, "connect", "NiN", all, rank, totals);
    if (made->object == NULL)
        return false;
    PyObject *calls = python->PyObject_GetAttrString(made->object, "calls");
    PyObject *timeout_s = python->PyObject_GetAttrString(made->object, "timeout_s");
    made->calls = python->PyCapsule_GetPointer(calls, "worker_client.core");
    made->timeout_s = python->PyFloat_AsDouble(timeout_s);
    python->Py_DecRef(calls); /* the object keeps it */
    python->Py_DecRef(timeout_s);
    return true;
}

int collective_connect(void *handles[], int ranks, int rank, void *listener, void **communicator)
{
    struct listener *from = listener;
    struct communicator *made = calloc(1, sizeof *made);
    int state;
    *communicator = NULL; /* NCCL looks at that, and goes on with its rings */
    const struct interpreter *python = made == NULL ? NULL : interpreter_enter(&state);
    bool joined = python != NULL && join(python, made, handles, ranks, rank, from->object);
    if (python != NULL) {
        if (!joined)
            interpreter_log_error(python, "all-reduces do not go through reducers");
        python->Py_DecRef(from->object); /* NCCL closes a listener only after it has connected */
        from->object = NULL;
        interpreter_leave(python, state);
    }
    if (!joined) {
        free(made);
        return NCCL_SYSTEM_ERROR;
    }
    for (size_t at = 0; at < REQUESTS; at++)
        made->requests[at].of = made;
    *communicator = made;
    return NCCL_SUCCESS;
}

/* Calls `close` of an object of bridge.py, and lets go of it. False: there is no Python any more. */
static bool close_object(PyObject *object)
{
    int state;
    const struct interpreter *python = interpreter_enter(&state);
    if (python == NULL)
        return false;
    PyObject *closed = python->PyObject_CallMethod(object, "close", NULL);
    if (closed == NULL)
        interpreter_log_error(python, "a communicator is closed");
    python->Py_DecRef(closed);
    python->Py_DecRef(object);
    interpreter_leave(python, state);
    return true;
}

int collective_close_listener(void *listener)
{
    struct listener *closing = listener;
    if (closing->object == NULL || close_object(closing->object))
        free(closing);
    return NCCL_SUCCESS;
}

int collective_close(void *communicator)
{
    struct communicator *closing = communicator;
    struct totals totals = closing->totals;
    if (close_object(closing->object)) /* else a thread of Python's may still have its memory */
        free(closing);
    PLUGIN_INFO("%llu all-reduces, %llu bytes went through reducers",
                (unsigned long long)totals.all_reduces, (unsigned long long)totals.bytes);
    return NCCL_SUCCESS;
}

/* -- all-reduces ----------------------------------------------------------------------------- */

int collective_all_reduce(void *communicator, const void *sent, void *received, size_t count,
                          int dtype, int op, void **request)
{
    struct communicator *here = communicator;
    int supported;
    *request = NULL;
    collective_supports(dtype, op, &supported);
    if (!supported)
        return NCCL_INVALID_ARGUMENT;
    struct request *made = here->requests, *end = made + REQUESTS;
    while (made < end && made->taken)
        made++;
    if (made == end)
        return NCCL_SUCCESS; /* NCCL asks again */
    size_t nbytes = count * dtype_itemsize(DTYPES[dtype]);
    made->asked = (struct all_reduce){
        .data = received,
        .source = sent,
        .nbytes = nbytes,
        .timeout_s = here->timeout_s,
        .dtype = DTYPES[dtype],
        .op = OPS[op],
        .why = made->why,
        .why_bytes = sizeof made->why,
    };
    made->why[0] = '\0';
    switch (here->calls->submit(here->calls->core, &made->asked)) {
    case CORE_BEGUN:
    case CORE_ASKED:
        made->taken = true;
        *request = made;
        return NCCL_SUCCESS;
    case CORE_CLOSED:
        PLUGIN_WARN("an all-reduce through reducers: this communicator's client was shut down");
        return NCCL_SYSTEM_ERROR;
    default:
        return NCCL_INTERNAL_ERROR;
    }
}

int collective_test(void *request, int *done, int *nbytes)
{
    struct request *asked = request;
    struct communicator *here = asked->of;
    enum all_reduce_state state = here->calls->test(&asked->asked);
    *done = state != ALL_REDUCE_PENDING;
    if (!*done)
        return NCCL_SUCCESS;
    asked->taken = false;
    if (state == ALL_REDUCE_DONE) {
        if (nbytes != NULL)
            *nbytes = (int)asked->asked.nbytes;
        here->totals.all_reduces++;
        here->totals.bytes += asked->asked.nbytes;
        return NCCL_SUCCESS;
    }
    PLUGIN_WARN("an all-reduce through reducers failed: %s", asked->why);
    return atomic_load(&here->calls->core->closed) ? NCCL_SYSTEM_ERROR : NCCL_REMOTE_ERROR;
}
