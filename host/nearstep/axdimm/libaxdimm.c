/* libaxdimm.so: starts the Python that built it, and passes each call to nearstep.axdimm.c_interface.
 *
 * Defined by the build: AXDIMM_PYTHON, path of the interpreter; AXDIMM_LIBPYTHON, its library. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

#include "axdimm.h"

#define NUMBER(value) ((unsigned long long)(value))
#define ADDRESS(pointer) NUMBER((uintptr_t)(pointer))

_Static_assert(sizeof(void *) == 8, "addresses of the AXDIMM have 64 bits");

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t attached; /* state in Python of a thread that Python did not start */
static pid_t process;
static PyObject *entry; /* nearstep.axdimm.c_interface.call; NULL: see `failure` */
static char failure[1024];
static _Thread_local char message[4096];

static void detach(void *state)
{
    PyEval_RestoreThread(state);
    PyGILState_Release(PyGILState_UNLOCKED);
}

/* Start Python as that interpreter would, but without the environment's PYTHON* variables, and without
 * changing the locale and the signal handlers of this program. */
static int initialise(void)
{
    if (access(AXDIMM_PYTHON, X_OK)) { /* Python would print its search path */
        snprintf(failure, sizeof failure, "the interpreter of libaxdimm.so does not exist: %s; build "
                 "the library again", AXDIMM_PYTHON);
        return 0;
    }
    PyPreConfig first;
    PyPreConfig_InitIsolatedConfig(&first);
    first.utf8_mode = 1;
    PyStatus status = Py_PreInitialize(&first);
    if (!PyStatus_Exception(status)) {
        PyConfig config;
        PyConfig_InitIsolatedConfig(&config);
        status = PyConfig_SetBytesString(&config, &config.executable, AXDIMM_PYTHON);
        if (!PyStatus_Exception(status))
            status = Py_InitializeFromConfig(&config);
        PyConfig_Clear(&config);
    }
    if (PyStatus_Exception(status))
        snprintf(failure, sizeof failure, "Python cannot start: %s",
                 status.err_msg ? status.err_msg : "it gives no reason");
    return !PyStatus_Exception(status);
}

static void explain(void)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    const char *reason = text ? PyUnicode_AsUTF8(text) : NULL;
    snprintf(failure, sizeof failure, "%s cannot import nearstep: %s", AXDIMM_PYTHON,
             reason ? reason : "it gives no reason");
    PyErr_Clear();
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

static void start(void)
{
    process = getpid();
    if (pthread_key_create(&attached, detach)) {
        snprintf(failure, sizeof failure, "there are no keys for data of threads left");
        return;
    }
    /* numpy looks for Python's names among those of the whole process, where they are missing if this
     * library was opened with RTLD_LOCAL. */
    dlopen(AXDIMM_LIBPYTHON, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD);
    if (!Py_IsInitialized()) {
        if (!initialise())
            return;
        PyEval_SaveThread();
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    PyObject *module = PyImport_ImportModule("nearstep.axdimm.c_interface");
    entry = module ? PyObject_GetAttrString(module, "call") : NULL;
    if (!entry)
        explain();
    Py_XDECREF(module);
    PyGILState_Release(gil);
}

static int fail(int status, const char *why)
{
    snprintf(message, sizeof message, "%s", why);
    return status;
}

/* Call `entry` with the values of a format of Py_BuildValue. */
static int call(const char *format, ...)
{
    pthread_once(&once, start);
    if (getpid() != process) /* a child has none of the threads, one of which may hold Python's lock */
        return fail(AXDIMM_CLOSED, "libaxdimm belongs to the process that first called it, not to a "
                                   "child of that one");
    if (!entry)
        return fail(AXDIMM_FAILED, failure);
    if (!PyGILState_GetThisThreadState()) { /* kept between calls: the driver knows threads by it */
        PyGILState_Ensure();
        pthread_setspecific(attached, PyEval_SaveThread());
    }
    PyGILState_STATE gil = PyGILState_Ensure();
    va_list values;
    va_start(values, format);
    PyObject *arguments = Py_VaBuildValue(format, values);
    va_end(values);
    PyObject *answer = arguments ? PyObject_CallObject(entry, arguments) : NULL;
    int status = AXDIMM_FAILED;
    const char *why = "Python has no memory left";
    if (!answer || !PyArg_ParseTuple(answer, "is", &status, &why))
        PyErr_Clear();
    fail(status, why);
    Py_XDECREF(answer);
    Py_XDECREF(arguments);
    PyGILState_Release(gil);
    return status;
}

int Axdimm(const char *device, AxdimmRuntime **runtime)
{
    return call("sKyK", "Axdimm", NUMBER(0), device, ADDRESS(runtime));
}

int RegisterStorage(AxdimmRuntime *runtime, const char *device, size_t nbytes, int flags, int *number)
{
    return call("sKyKiK", "RegisterStorage", ADDRESS(runtime), device, NUMBER(nbytes), flags,
                ADDRESS(number));
}

int MallocX(AxdimmRuntime *runtime, AxdimmPlace x, size_t nbytes, int channel, void **ptr)
{
    return call("sKiKiK", "MallocX", ADDRESS(runtime), (int)x, NUMBER(nbytes), channel, ADDRESS(ptr));
}

int FreeX(AxdimmRuntime *runtime, void *ptr)
{
    return call("sKK", "FreeX", ADDRESS(runtime), ADDRESS(ptr));
}

static int copy(const char *name, AxdimmRuntime *runtime, void *dst, const void *src, size_t nbytes)
{
    return call("sKKKK", name, ADDRESS(runtime), ADDRESS(dst), ADDRESS(src), NUMBER(nbytes));
}

int MemcpyX2Y(AxdimmRuntime *runtime, void *dst, const void *src, size_t nbytes)
{
    return copy("MemcpyX2Y", runtime, dst, src, nbytes);
}

int CopyNVMeToGPU(AxdimmRuntime *runtime, void *dst, const void *src, size_t nbytes)
{
    return copy("CopyNVMeToGPU", runtime, dst, src, nbytes);
}

int CopyGPUToNVMe(AxdimmRuntime *runtime, void *dst, const void *src, size_t nbytes)
{
    return copy("CopyGPUToNVMe", runtime, dst, src, nbytes);
}

int SetArbiterAcc(AxdimmRuntime *runtime, int channel)
{
    return call("sKi", "SetArbiterAcc", ADDRESS(runtime), channel);
}

int SetArbiterNormal(AxdimmRuntime *runtime, int channel)
{
    return call("sKi", "SetArbiterNormal", ADDRESS(runtime), channel);
}

int RunAdamOnAxdimmAsync(AxdimmRuntime *runtime, void *p, void *m, void *v, const void *g,
                         size_t nparams, double lr, double beta1, double beta2, double eps,
                         double weight_decay, int64_t t, int channel, AxdimmRun **run)
{
    return call("sKKKKKKdddddLiK", "RunAdamOnAxdimmAsync", ADDRESS(runtime), ADDRESS(p), ADDRESS(m),
                ADDRESS(v), ADDRESS(g), NUMBER(nparams), lr, beta1, beta2, eps, weight_decay,
                (long long)t, channel, ADDRESS(run));
}

int AxdimmWait(AxdimmRuntime *runtime, AxdimmRun *run)
{
    return call("sKK", "AxdimmWait", ADDRESS(runtime), ADDRESS(run));
}

int AxdimmClose(AxdimmRuntime *runtime)
{
    return call("sK", "AxdimmClose", ADDRESS(runtime));
}

const char *AxdimmError(void)
{
    return message;
}
