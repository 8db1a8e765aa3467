#include "interpreter.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "plugin.h"

enum { OLDEST_MINOR = 11, NEWEST_MINOR = 15, ROOM = 3 }; /* of Python 3; folders above this library */

static struct interpreter found;
static bool usable;
static pthread_once_t looked = PTHREAD_ONCE_INIT;

static bool look_up(void *library)
{
#define LOOK_UP(result, name, arguments) \
    if ((*(void **)&found.name = dlsym(library, #name)) == NULL) \
        return false;
    INTERPRETER_FUNCTIONS(LOOK_UP)
#undef LOOK_UP
    return true;
}

/* The libpython that is named, or the newest that the system has. */
static void *open_library(void)
{
    const char *named = getenv("REDUCTION_LIBPYTHON");
    if (named != NULL && *named != '\0')
        return dlopen(named, RTLD_NOW | RTLD_GLOBAL);
    void *library = NULL;
    for (int minor = NEWEST_MINOR; library == NULL && minor >= OLDEST_MINOR; minor--) {
        char name[64];
        snprintf(name, sizeof name, "libpython3.%d.so.1.0", minor);
        library = dlopen(name, RTLD_NOW | RTLD_GLOBAL); /* extensions need its symbols */
    }
    return library;
}

/* Has Python find the packages that this library is installed with. */
static void show_packages(void)
{
    Dl_info here;
    if (dladdr(&found, &here) == 0)
        return;
    char *folder = strdup(here.dli_fname), *slash = NULL;
    for (int up = 0; folder != NULL && up < ROOM; up++)
        if ((slash = strrchr(folder, '/')) != NULL)
            *slash = '\0';
    PyObject *path = found.PySys_GetObject("path");
    if (slash != NULL && path != NULL)
        found.Py_DecRef(found.PyObject_CallMethod(path, "insert", "is", 0, folder));
    free(folder);
}

static void look(void)
{
    void *library = NULL;
    if (!look_up(RTLD_DEFAULT) && ((library = open_library()) == NULL || !look_up(library))) {
        const char *why = dlerror();
        PLUGIN_WARN("reducers need Python in this program, and it has none: set "
                    "REDUCTION_LIBPYTHON to libpython's path, as `worker-client nccl` does (%s)",
                    why == NULL ? "it lacks functions" : why);
        return;
    }
    usable = true;
    if (found.Py_IsInitialized())
        return;
    found.Py_InitializeEx(0); /* signals stay the program's */
    show_packages();
    found.PyEval_SaveThread();
}

/* Whether an interpreter ends: whoever asks for its GIL then would not come back. */
static bool is_ending(void)
{
    int (*ending)(void) = NULL;
    *(void **)&ending = dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    if (ending == NULL) /* before Python 3.13 */
        *(void **)&ending = dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
    return !found.Py_IsInitialized() || (ending != NULL && ending());
}

const struct interpreter *interpreter_enter(int *state)
{
    pthread_once(&looked, look);
    if (!usable || is_ending())
        return NULL;
    *state = found.PyGILState_Ensure();
    return &found;
}

void interpreter_leave(const struct interpreter *python, int state)
{
    python->PyGILState_Release(state);
}

void interpreter_log_error(const struct interpreter *python, const char *what)
{
    PyObject *type = NULL, *value = NULL, *traceback = NULL;
    python->PyErr_Fetch(&type, &value, &traceback);
    PyObject *name = type == NULL ? NULL : python->PyObject_GetAttrString(type, "__name__");
    PyObject *words = value == NULL ? NULL : python->PyObject_Str(value);
    const char *kind = name == NULL ? NULL : python->PyUnicode_AsUTF8AndSize(name, NULL);
    const char *said = words == NULL ? NULL : python->PyUnicode_AsUTF8AndSize(words, NULL);
    python->PyErr_Clear();
    PLUGIN_WARN("%s: %s: %s", what, kind == NULL ? "an error" : kind,
                said == NULL ? "without words" : said);
    PyObject *owned[] = {type, value, traceback, name, words};
    for (size_t at = 0; at < sizeof owned / sizeof *owned; at++)
        python->Py_DecRef(owned[at]);
}
