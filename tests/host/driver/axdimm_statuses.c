/* Calls of every function of axdimm.h with arguments that are right and wrong.
 *
 * usage: axdimm_statuses DEVICE FOLDER; prints the number of checks, and lines of those that failed. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "axdimm.h"

static int checks, wrong;

static void expect(int status, const char *said, int found, const char *call)
{
    checks++;
    if (found == status && strstr(AxdimmError(), said) && (status || !*AxdimmError()))
        return;
    wrong++;
    printf("%s: status %d, not %d: %s\n", call, found, status, AxdimmError());
}
#define EXPECT(status, said, call) expect(AXDIMM_##status, said, call, #call)
#define OK(call) EXPECT(OK, "", call)

static AxdimmRuntime *r;
static void *p, *m, *v, *g;

static int adam(void *g, size_t count, int64_t t, int channel, AxdimmRun **run)
{
    return RunAdamOnAxdimmAsync(r, p, m, v, g, count, 1e-3, 0.9, 0.999, 1e-8, 0.0, t, channel, run);
}

static void *other_thread(void *channel)
{
    int number = (int)(intptr_t)channel, failed = 0;
    char data[64], back[64];
    for (int i = 0; i < 20; i++) {
        void *ptr;
        memset(data, i + number, 64);
        failed += MallocX(r, AXDIMM_ON_AXDIMM, 64, number, &ptr) != AXDIMM_OK;
        failed += MemcpyX2Y(r, ptr, data, 64) != AXDIMM_OK;
        failed += MemcpyX2Y(r, back, ptr, 64) != AXDIMM_OK;
        failed += memcmp(data, back, 64) != 0;
        failed += FreeX(r, ptr) != AXDIMM_OK;
        failed += FreeX(r, ptr) != AXDIMM_ARGUMENT;
        failed += strstr(AxdimmError(), "freed") == NULL;
    }
    return (void *)(intptr_t)failed;
}

int main(int count, char **words)
{
    static float ones[256];
    char drive[4096], text[4096], local;
    void *gpu, *ssd, *cpu, *x;
    AxdimmRun *run;
    AxdimmRuntime *second;
    int number, child;
    if (count != 3)
        return 2;
    snprintf(drive, sizeof drive, "%s/ssd", words[2]);
    snprintf(text, sizeof text, "%s/text", words[2]);
    for (int i = 0; i < 256; i++)
        ones[i] = 1.0f;

    EXPECT(ARGUMENT, "NULL", Axdimm(NULL, &r));
    EXPECT(ARGUMENT, "runtime must not be NULL", Axdimm(words[1], NULL));
    EXPECT(ARGUMENT, "backend", Axdimm("nosuch:axdimm", &r));
    EXPECT(ARGUMENT, "cannot open", Axdimm("\xff\xfe", &r));
    EXPECT(DEVICE, "an AXDIMM", Axdimm("golden:smartssd?engine=numpy", &r));
    EXPECT(ARGUMENT, "of Axdimm", FreeX(NULL, &local));
    EXPECT(ARGUMENT, "of Axdimm", AxdimmClose((AxdimmRuntime *)&local));
    OK(Axdimm(words[1], &r));

    OK(RegisterStorage(r, drive, 1 << 20, AXDIMM_BUFFERED, &number));
    EXPECT(ARGUMENT, "NULL", RegisterStorage(r, NULL, 1 << 20, 0, NULL));
    EXPECT(ARGUMENT, "flags", RegisterStorage(r, drive, 1 << 20, 8, NULL));
    EXPECT(STORAGE, text, RegisterStorage(r, text, 0, AXDIMM_BUFFERED, NULL));

    for (int i = 0; i < 4; i++)
        OK(MallocX(r, AXDIMM_ON_AXDIMM, 1024, 0, (void **[]){&p, &m, &v, &g}[i]));
    OK(MallocX(r, AXDIMM_ON_CPU, 1024, AXDIMM_ANY, &cpu));
    OK(MallocX(r, AXDIMM_ON_GPU, 1024, AXDIMM_ANY, &gpu));
    OK(MallocX(r, AXDIMM_ON_NVME, 1024, AXDIMM_ANY, &ssd));
    EXPECT(ARGUMENT, "ptr must not be NULL", MallocX(r, AXDIMM_ON_CPU, 1, AXDIMM_ANY, NULL));
    EXPECT(ARGUMENT, "x must be", MallocX(r, (AxdimmPlace)4, 1, AXDIMM_ANY, &x));
    EXPECT(ARGUMENT, "nbytes", MallocX(r, AXDIMM_ON_CPU, 0, AXDIMM_ANY, &x));
    EXPECT(ARGUMENT, "channel", MallocX(r, AXDIMM_ON_AXDIMM, 1, 2, &x));
    EXPECT(ARGUMENT, "channel", MallocX(r, AXDIMM_ON_NVME, 1, 1, &x));
    EXPECT(ARGUMENT, "channels", MallocX(r, AXDIMM_ON_GPU, 1, 0, &x));
    EXPECT(MEMORY, "bytes", MallocX(r, AXDIMM_ON_AXDIMM, SIZE_MAX, 0, &x));
    EXPECT(MEMORY, "", MallocX(r, AXDIMM_ON_NVME, 1 << 21, AXDIMM_ANY, &x));

    OK(MemcpyX2Y(r, p, ones, 1024));
    OK(MemcpyX2Y(r, m, p, 1024));
    OK(MemcpyX2Y(r, v, p, 1024));
    OK(MemcpyX2Y(r, (char *)g + 4, (char *)p + 4, 1020));
    OK(MemcpyX2Y(r, ssd, g, 0));
    OK(MemcpyX2Y(r, ssd, p, 1024));
    OK(CopyNVMeToGPU(r, gpu, ssd, 1024));
    OK(CopyGPUToNVMe(r, ssd, gpu, 1024));
    checks++;
    wrong += memcmp(gpu, ones, 1024) != 0;
    EXPECT(ARGUMENT, "dst must not be NULL", MemcpyX2Y(r, NULL, p, 1));
    EXPECT(ARGUMENT, "src must not be NULL", MemcpyX2Y(r, p, NULL, 1));
    EXPECT(ARGUMENT, "[0, 1025) must lie in [0, 1024)", MemcpyX2Y(r, ssd, p, 1025));
    EXPECT(ARGUMENT, "[1024, 1025)", MemcpyX2Y(r, ones, (char *)p + 1024, 1));
    EXPECT(ARGUMENT, "allocation", MemcpyX2Y(r, ones, (char *)p + 2048, 1));
    EXPECT(ARGUMENT, "allocation", MemcpyX2Y(r, ones, (char *)p - 1, 1));
    EXPECT(ARGUMENT, "", MemcpyX2Y(r, p, ones, SIZE_MAX));
    EXPECT(ARGUMENT, "overlap", MemcpyX2Y(r, (char *)p + 8, p, 16));
    EXPECT(ARGUMENT, "must be on GPU", CopyNVMeToGPU(r, cpu, ssd, 1));
    EXPECT(ARGUMENT, "of MallocX", CopyNVMeToGPU(r, ones, ssd, 1));

    EXPECT(MODE, "acceleration", SetArbiterNormal(r, 0));
    EXPECT(ARGUMENT, "channel", SetArbiterAcc(r, 2));
    EXPECT(ARGUMENT, "channel", SetArbiterNormal(r, -1));
    OK(SetArbiterAcc(r, 0));
    EXPECT(MODE, "normal", SetArbiterAcc(r, 0));
    EXPECT(MODE, "normal", MemcpyX2Y(r, ones, p, 4));
    EXPECT(ARGUMENT, "must be on AXDIMM", adam(gpu, 256, 1, 0, &run));
    EXPECT(ARGUMENT, "of MallocX", adam(ones, 256, 1, 0, &run));
    EXPECT(ARGUMENT, "nparams", adam(g, 0, 1, 0, &run));
    EXPECT(ARGUMENT, "[0, 1028)", adam(g, 257, 1, 0, &run));
    EXPECT(ARGUMENT, "step", adam(g, 256, 0, 0, &run));
    EXPECT(ARGUMENT, "channel 1", adam(g, 256, 1, 1, &run));
    OK(adam(g, 256, 1, 0, &run));
    OK(AxdimmWait(r, run));
    EXPECT(ARGUMENT, "waited", AxdimmWait(r, run));
    EXPECT(ARGUMENT, "waited", AxdimmWait(r, NULL));
    OK(adam(g, 256, 2, 0, NULL));
    OK(SetArbiterNormal(r, 0));
    OK(MemcpyX2Y(r, ones, p, 1024));

    EXPECT(ARGUMENT, "first byte", FreeX(r, (char *)p + 4));
    EXPECT(ARGUMENT, "of MallocX", FreeX(r, &local));
    OK(FreeX(r, g));
    EXPECT(ARGUMENT, "freed", FreeX(r, g));
    EXPECT(ARGUMENT, "freed", MemcpyX2Y(r, ones, g, 4));
    OK(FreeX(r, ssd));
    EXPECT(ARGUMENT, "freed", FreeX(r, ssd));
    OK(FreeX(r, gpu));

    pthread_t threads[4];
    for (intptr_t i = 0; i < 4; i++)
        pthread_create(&threads[i], NULL, other_thread, (void *)(i % 2));
    for (int i = 0; i < 4; i++) {
        void *failed;
        pthread_join(threads[i], &failed);
        checks++;
        wrong += failed != NULL;
    }
    child = fork();
    if (!child)
        _exit(FreeX(r, p));
    waitpid(child, &number, 0);
    expect(AXDIMM_CLOSED, "", WEXITSTATUS(number), "FreeX in a child");

    OK(Axdimm(words[1], &second));
    EXPECT(ARGUMENT, "allocation", FreeX(second, p)); /* of the other runtime */
    OK(SetArbiterAcc(r, 1));
    OK(AxdimmClose(r));
    EXPECT(CLOSED, "closed", AxdimmClose(r));
    EXPECT(CLOSED, "closed", MallocX(r, AXDIMM_ON_CPU, 1, AXDIMM_ANY, &x));
    EXPECT(CLOSED, "closed", FreeX(r, p));
    OK(AxdimmClose(second));
    printf("%d checks, %d wrong\n", checks, wrong);
    return wrong != 0;
}
