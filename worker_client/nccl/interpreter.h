/* The Python of this process, found when it is needed: nothing is linked with it.
 *
 * A program that has one, such as torch's, is entered by taking its GIL, for which another thread may
 * let this one wait. Whoever calls NCCL's set-up with the GIL taken would so wait for itself: torch and
 * other bindings of NCCL release it. A program that has none is given one, of the libpython that
 * REDUCTION_LIBPYTHON names or that the system has.
 */
#ifndef WORKER_NCCL_INTERPRETER_H
#define WORKER_NCCL_INTERPRETER_H

#include <stdbool.h>
#include <sys/types.h>

typedef struct python_object PyObject;

/* Python's own functions, by their names. */
#define INTERPRETER_FUNCTIONS(X) \
    X(int, Py_IsInitialized, (void)) \
    X(void, Py_InitializeEx, (int signals)) \
    X(void *, PyEval_SaveThread, (void)) \
    X(int, PyGILState_Ensure, (void)) \
    X(void, PyGILState_Release, (int state)) \
    X(PyObject *, PyImport_ImportModule, (const char *name)) \
    X(PyObject *, PySys_GetObject, (const char *name)) \
    X(PyObject *, PyObject_CallMethod, (PyObject *, const char *name, const char *format, ...)) \
    X(PyObject *, PyObject_GetAttrString, (PyObject *, const char *name)) \
    X(PyObject *, PyObject_Str, (PyObject *)) \
    X(PyObject *, PyBytes_FromStringAndSize, (const char *, ssize_t)) \
    X(char *, PyBytes_AsString, (PyObject *)) \
    X(const char *, PyUnicode_AsUTF8AndSize, (PyObject *, ssize_t *)) \
    X(double, PyFloat_AsDouble, (PyObject *)) \
    X(PyObject *, PyMemoryView_FromMemory, (char *, ssize_t, int flags)) \
    X(void *, PyCapsule_GetPointer, (PyObject *, const char *name)) \
    X(void, PyErr_Fetch, (PyObject **type, PyObject **value, PyObject **traceback)) \
    X(void, PyErr_Clear, (void)) \
    X(void, Py_DecRef, (PyObject *))

struct interpreter {
#define DECLARE(result, name, arguments) result(*name) arguments;
    INTERPRETER_FUNCTIONS(DECLARE)
#undef DECLARE
};

/* Takes the GIL, and begins an interpreter if there is none. NULL: there can be none, as the log says, or
 * it ends just now. */
const struct interpreter *interpreter_enter(int *state);
void interpreter_leave(const struct interpreter *python, int state);
/* Logs what Python has raised, and what could not be done because of it. */
void interpreter_log_error(const struct interpreter *python, const char *what);

#endif
