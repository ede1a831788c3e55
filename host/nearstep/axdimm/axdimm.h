/* The AXDIMM runtime in C: the functions of Table 2 of the paper by their names, over the driver of
 * nearstep.axdimm.runtime. `nearstep axdimm library -o DIR` builds libaxdimm.so, and copies this file.
 *
 * Every function but AxdimmError returns an AxdimmStatus. A function that fails has changed nothing,
 * unless a run or a drive failed; AxdimmError() says why. Any thread may call any function.
 *
 * An address (`void *`) is
 *   - of AXDIMM or NVMe memory, as MallocX returns it: never dereferenced, `(char *)ptr + n` is n bytes
 *     further, and an address that was freed or is outside its allocation is refused;
 *   - of CPU or GPU memory, as MallocX returns it, or of any other memory of the program: an ordinary
 *     pointer, whose bytes the program may read and write.
 */
#ifndef AXDIMM_H
#define AXDIMM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define AXDIMM_API __attribute__((visibility("default")))

typedef enum {
    AXDIMM_OK = 0,
    AXDIMM_ARGUMENT = 1, /* invalid name, address, size, handle; nothing was done */
    AXDIMM_MEMORY = 2,   /* a channel, a drive or the host has too little free memory */
    AXDIMM_CLOSED = 3,   /* the runtime was closed, or belongs to the parent of this process */
    AXDIMM_MODE = 4,     /* the channel is in the other mode; nothing was done */
    AXDIMM_BUSY = 5,     /* a run or copy in flight uses the memory; nothing was done */
    AXDIMM_STORAGE = 6,  /* a drive failed, or is no drive of the runtime */
    AXDIMM_DEVICE = 7,   /* the AXDIMM refused, failed or did not answer */
    AXDIMM_FAILED = 8    /* any other error, such as a package that is not installed */
} AxdimmStatus;

typedef enum { /* X and Y of MallocX, FreeX and MemcpyX2Y */
    AXDIMM_ON_CPU = 0,
    AXDIMM_ON_AXDIMM = 1,
    AXDIMM_ON_GPU = 2, /* page-aligned memory of the host, with or without a GPU: CUDA is not used */
    AXDIMM_ON_NVME = 3
} AxdimmPlace;

enum { AXDIMM_ANY = -1 }; /* a channel of MallocX: 0 of the AXDIMM, the emptiest SSD */

enum { /* flags of RegisterStorage */
    AXDIMM_BUFFERED = 1, /* use the page cache, for file systems without O_DIRECT */
    AXDIMM_OVERWRITE = 2 /* overwrite a block device, or a file that is not empty */
};

/* Handles. A handle that is unknown, closed or was waited for is refused. */
typedef struct AxdimmRuntime AxdimmRuntime;
typedef struct AxdimmRun AxdimmRun;

/* Open the runtime with an AXDIMM, such as "golden:axdimm" or "sim:axdimm?channels=2". */
AXDIMM_API int Axdimm(const char *device, AxdimmRuntime **runtime);

/* Register an NVMe SSD, a block device or a file; `number`, which may be NULL, is its number from 0.
 * nbytes: create a drive of this size; 0: the drive exists. */
AXDIMM_API int RegisterStorage(AxdimmRuntime *runtime, const char *device, size_t nbytes, int flags,
                               int *number);

/* Allocate nbytes on X. Contents are undefined, on a drive zeros.
 * channel: of the AXDIMM, or number of the SSD; AXDIMM_ANY on the CPU and the GPU. */
AXDIMM_API int MallocX(AxdimmRuntime *runtime, AxdimmPlace x, size_t nbytes, int channel, void **ptr);

/* Free an allocation by the address of its first byte. */
AXDIMM_API int FreeX(AxdimmRuntime *runtime, void *ptr);

/* Copy nbytes from src to dst, on any two places, and return when the copy is complete. */
AXDIMM_API int MemcpyX2Y(AxdimmRuntime *runtime, void *dst, const void *src, size_t nbytes);

/* Copy between the GPU and an SSD, bypassing the memory of the host (section 4.4). */
AXDIMM_API int CopyNVMeToGPU(AxdimmRuntime *runtime, void *dst, const void *src, size_t nbytes);
AXDIMM_API int CopyGPUToNVMe(AxdimmRuntime *runtime, void *dst, const void *src, size_t nbytes);

/* Set the arbiter of a channel to acceleration mode: its memory is the kernel's. */
AXDIMM_API int SetArbiterAcc(AxdimmRuntime *runtime, int channel);

/* Wait for the channel's run, and set the arbiter to normal mode: its memory is the host's. */
AXDIMM_API int SetArbiterNormal(AxdimmRuntime *runtime, int channel);

/* Start an Adam step of nparams floats on a channel, and return at once.
 * t: the step, from 1. run: for AxdimmWait; NULL if SetArbiterNormal is to wait. */
AXDIMM_API int RunAdamOnAxdimmAsync(AxdimmRuntime *runtime, void *p, void *m, void *v, const void *g,
                                    size_t nparams, double lr, double beta1, double beta2, double eps,
                                    double weight_decay, int64_t t, int channel, AxdimmRun **run);

/* Wait for a run; the handle ends with the run. */
AXDIMM_API int AxdimmWait(AxdimmRuntime *runtime, AxdimmRun *run);

/* Set every channel to normal mode, close the drives and the AXDIMM, and free all allocations. */
AXDIMM_API int AxdimmClose(AxdimmRuntime *runtime);

/* Why the last call of this thread failed; empty if it did not. Valid until the thread's next call. */
AXDIMM_API const char *AxdimmError(void);

#ifdef __cplusplus
}
#endif

#endif
