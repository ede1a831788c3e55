/* Train a linear model on an AXDIMM by the functions of Table 2 of the paper.
 *
 * usage: linear DEVICE DRIVE [FILE]
 *   DEVICE  such as golden:axdimm, sim:axdimm
 *   DRIVE   file of the emulated NVMe SSD, which is created
 *   FILE    the trained weights are written to it, as hexadecimal floats */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "axdimm.h"

enum { WEIGHTS = 96, SAMPLES = 64, STEPS = 30, NBYTES = WEIGHTS * sizeof(float) };

static float inputs[SAMPLES][WEIGHTS], targets[SAMPLES];
static AxdimmRuntime *runtime;

static void check(int status, const char *what)
{
    if (status == AXDIMM_OK)
        return;
    fprintf(stderr, "%s: status %d: %s\n", what, status, AxdimmError());
    AxdimmClose(runtime);
    exit(1);
}
#define CHECK(call) check(call, #call)

static float next(void) /* a number from -0.5 to 0.5 */
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return (float)(state >> 16) / 65536.0f - 0.5f;
}

/* Write the gradient of the mean squared error, and return the error. */
static float gradient(const float *weights, float *out)
{
    float loss = 0.0f;
    memset(out, 0, NBYTES);
    for (int i = 0; i < SAMPLES; i++) {
        float error = -targets[i];
        for (int j = 0; j < WEIGHTS; j++)
            error += weights[j] * inputs[i][j];
        for (int j = 0; j < WEIGHTS; j++)
            out[j] += error * inputs[i][j];
        loss += error * error;
    }
    for (int j = 0; j < WEIGHTS; j++)
        out[j] *= 2.0f / SAMPLES;
    return loss / SAMPLES;
}

int main(int count, char **words)
{
    static float weights[WEIGHTS], gradients[WEIGHTS], zeros[WEIGHTS];
    void *p, *m, *v, *g, *ssd, *gpu;
    float first = 0.0f, loss = 0.0f;
    if (count < 3)
        return fprintf(stderr, "usage: %s DEVICE DRIVE [FILE]\n", words[0]), 2;
    for (int i = 0; i < SAMPLES; i++) {
        for (int j = 0; j < WEIGHTS; j++)
            inputs[i][j] = next();
        targets[i] = next();
    }
    CHECK(Axdimm(words[1], &runtime));
    CHECK(MallocX(runtime, AXDIMM_ON_AXDIMM, NBYTES, 0, &p));
    CHECK(MallocX(runtime, AXDIMM_ON_AXDIMM, NBYTES, 0, &m));
    CHECK(MallocX(runtime, AXDIMM_ON_AXDIMM, NBYTES, 0, &v));
    CHECK(MallocX(runtime, AXDIMM_ON_AXDIMM, NBYTES, 0, &g));
    CHECK(MemcpyX2Y(runtime, p, weights, NBYTES));
    CHECK(MemcpyX2Y(runtime, m, zeros, NBYTES));
    CHECK(MemcpyX2Y(runtime, v, zeros, NBYTES));
    for (int t = 1; t <= STEPS; t++) {
        AxdimmRun *run;
        loss = gradient(weights, gradients);
        if (t == 1)
            first = loss;
        CHECK(MemcpyX2Y(runtime, g, gradients, NBYTES));
        CHECK(SetArbiterAcc(runtime, 0));
        CHECK(RunAdamOnAxdimmAsync(runtime, p, m, v, g, WEIGHTS, 1e-2, 0.9, 0.999, 1e-8, 0.01, t, 0,
                                   &run));
        CHECK(AxdimmWait(runtime, run));
        CHECK(SetArbiterNormal(runtime, 0));
        CHECK(MemcpyX2Y(runtime, weights, p, NBYTES));
    }
    printf("loss %.4f at first, %.4f after %d steps\n", first, loss, STEPS - 1);

    CHECK(RegisterStorage(runtime, words[2], 1 << 20, AXDIMM_BUFFERED | AXDIMM_OVERWRITE, NULL));
    CHECK(MallocX(runtime, AXDIMM_ON_NVME, NBYTES, AXDIMM_ANY, &ssd));
    CHECK(MallocX(runtime, AXDIMM_ON_GPU, NBYTES, AXDIMM_ANY, &gpu));
    CHECK(MemcpyX2Y(runtime, ssd, p, NBYTES));
    CHECK(CopyNVMeToGPU(runtime, gpu, ssd, NBYTES));
    printf("weights by way of the SSD: %s\n", memcmp(gpu, weights, NBYTES) ? "wrong" : "equal");
    CHECK(FreeX(runtime, gpu));
    CHECK(FreeX(runtime, ssd));
    CHECK(AxdimmClose(runtime));

    if (count > 3) {
        FILE *file = fopen(words[3], "w");
        for (int j = 0; file && j < WEIGHTS; j++)
            fprintf(file, "%a\n", weights[j]);
        if (!file || fclose(file))
            return perror(words[3]), 1;
    }
    return 0;
}
