/* Trains on a computational SSD from Linux, with standard NVMe commands alone.
 *
 *     nvme_adamw PID [PARAMETERS [STEPS]]
 *
 * PID is the identifier, in hex, of the program that computes AdamW: the digest of its arithmetic,
 * which `nvme get-log` of the program list shows. The program finds the namespaces of the local
 * memory (CSI 3) and of the programs (CSI 4) among /dev/ng0n*, writes p, m and v, and executes a
 * step for each gradient. It leaves the files p, m and v. No nearstep is needed:
 *
 *     gcc -static -O2 nvme_adamw.c -o nvme_adamw -lm
 */

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include <linux/nvme_ioctl.h>

enum { MEMORY_SET = 3, PROGRAM_SET = 4, CHUNK = 256 * 1024, ARRAYS = 4, ALIGN = 64 };
enum { IDENTIFY = 0x06, GET_LOG = 0x02, ACTIVATE = 0x88, RANGES = 0x89 };
enum { MEMORY_READ = 0x02, MEMORY_WRITE = 0x05, EXECUTE = 0x01 };

struct range {
    uint32_t nsid, bytes;
    uint64_t start, reserved[2];
};

struct block { /* arguments of a step: registers of the rule */
    uint32_t version, count;
    float decay, m_weight, v_weight, v_decay, v_correction, eps, step_size;
    uint32_t decoupled, m_from_g, zeros[5];
};

static int memory = -1, programs = -1;
static uint32_t memory_id, programs_id;
static unsigned commands;

static uint64_t submit(int fd, unsigned long request, struct nvme_passthru_cmd64 command,
                       const char *what) {
    command.timeout_ms = 120000;
    int status = ioctl(fd, request, &command);
    commands++;
    if (status) {
        fprintf(stderr, "%s: %s %#x\n", what, status < 0 ? strerror(errno) : "status", status);
        exit(1);
    }
    return command.result;
}

static void find(void) {
    static uint8_t data[4096] __attribute__((aligned(4096)));
    char path[32];
    for (int number = 1; number < 16; number++) {
        snprintf(path, sizeof path, "/dev/ng0n%d", number);
        int fd = open(path, O_RDWR);
        if (fd < 0)
            continue;
        uint32_t id = ioctl(fd, NVME_IOCTL_ID), csi = 0;
        struct nvme_passthru_cmd64 identify = {.opcode = IDENTIFY, .nsid = id, .cdw10 = 3,
                                               .addr = (uintptr_t)data, .data_len = sizeof data};
        submit(fd, NVME_IOCTL_ADMIN64_CMD, identify, "identify");
        for (int at = 0; at < 4092 && data[at + 1]; at += 4 + data[at + 1])
            if (data[at] == 4)
                csi = data[at + 4];
        printf("%s: namespace %u, command set %u\n", path, id, csi);
        if (csi == MEMORY_SET)
            memory = fd, memory_id = id;
        else if (csi == PROGRAM_SET)
            programs = fd, programs_id = id;
        else
            close(fd);
    }
    if (memory < 0 || programs < 0) {
        fprintf(stderr, "there is no namespace of memory or of programs\n");
        exit(1);
    }
}

static void transfer(int opcode, uint64_t start, void *data, size_t bytes) {
    for (size_t at = 0; at < bytes; at += CHUNK) {
        uint32_t size = bytes - at < CHUNK ? bytes - at : CHUNK;
        struct nvme_passthru_cmd64 command = {
            .opcode = opcode, .nsid = memory_id, .addr = (uintptr_t)data + at, .data_len = size,
            .cdw10 = start + at, .cdw11 = (start + at) >> 32, .cdw12 = size};
        submit(memory, NVME_IOCTL_IO64_CMD, command, "memory");
    }
}

/* Index of the program with an identifier; its position in the list, counted from 1. */
static uint32_t program(uint64_t wanted) {
    static uint8_t log[4096] __attribute__((aligned(4096)));
    struct nvme_passthru_cmd64 command = {
        .opcode = GET_LOG, .nsid = programs_id, .addr = (uintptr_t)log, .data_len = sizeof log,
        .cdw10 = 0x82 | (sizeof log / 4 - 1) << 16};
    submit(programs, NVME_IOCTL_ADMIN64_CMD, command, "program list");
    uint32_t count = *(uint32_t *)log, found = 0;
    for (uint32_t index = 1; index <= count && index < 64; index++) {
        uint64_t pid = 0;
        for (int byte = 0; byte < 8; byte++)
            pid = pid << 8 | log[64 * index + 8 + byte];
        printf("program %u: %016llx\n", index, (unsigned long long)pid);
        if (pid == wanted)
            found = index;
    }
    if (!found) {
        fprintf(stderr, "no program has this identifier\n");
        exit(1);
    }
    return found;
}

/* A number in [-1, 1) that binary32 has exactly. */
static float number(uint32_t step, uint32_t index) {
    uint32_t x = index * 2654435761u + step * 40503u + 12345u;
    x ^= x >> 15, x *= 2246822519u, x ^= x >> 13;
    return (int32_t)(x >> 8) / 8388608.0f - 1.0f;
}

static struct block arguments(int step) {
    const double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01;
    return (struct block){
        .version = 1, .count = 9,
        .decay = 1.0 - lr * weight_decay, .m_weight = 1.0 - beta1, .v_weight = 1.0 - beta2,
        .v_decay = beta2, .v_correction = sqrt(1.0 - pow(beta2, step)), .eps = eps,
        .step_size = -(lr / (1.0 - pow(beta1, step))), .decoupled = 1};
}

static void save(const char *name, const float *data, size_t bytes) {
    FILE *file = fopen(name, "wb");
    if (!file || fwrite(data, 1, bytes, file) != bytes || fclose(file)) {
        perror(name);
        exit(1);
    }
}

int main(int count, char **given) {
    uint64_t pid = count > 1 ? strtoull(given[1], NULL, 16) : 0;
    uint32_t elements = count > 2 ? atoi(given[2]) : 65536 + 16;
    int steps = count > 3 ? atoi(given[3]) : 10;
    size_t bytes = 4 * (size_t)elements, span = (bytes + ALIGN - 1) / ALIGN * ALIGN;
    float *data = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    struct range *ranges = aligned_alloc(4096, 4096);
    struct block *block = aligned_alloc(4096, 4096);

    find();
    uint32_t index = program(pid);
    struct nvme_passthru_cmd64 activate = {.opcode = ACTIVATE, .nsid = programs_id,
                                           .cdw10 = index | 1 << 16};
    submit(programs, NVME_IOCTL_ADMIN64_CMD, activate, "activate");
    for (int array = 0; array < ARRAYS; array++) /* p, g, m, v */
        ranges[array] = (struct range){memory_id, bytes, array * span, {0, 0}};
    struct nvme_passthru_cmd64 create = {.opcode = RANGES, .nsid = programs_id,
                                         .addr = (uintptr_t)ranges,
                                         .data_len = ARRAYS * sizeof *ranges, .cdw11 = ARRAYS};
    uint64_t set = submit(programs, NVME_IOCTL_ADMIN64_CMD, create, "range set");

    for (uint32_t i = 0; i < elements; i++)
        data[i] = number(0, i);
    transfer(MEMORY_WRITE, 0, data, bytes);
    memset(data, 0, bytes);
    transfer(MEMORY_WRITE, 2 * span, data, bytes);
    transfer(MEMORY_WRITE, 3 * span, data, bytes);
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int step = 1; step <= steps; step++) {
        for (uint32_t i = 0; i < elements; i++)
            data[i] = number(step, i);
        transfer(MEMORY_WRITE, span, data, bytes);
        *block = arguments(step);
        struct nvme_passthru_cmd64 execute = {
            .opcode = EXECUTE, .nsid = programs_id, .addr = (uintptr_t)block,
            .data_len = sizeof *block, .cdw2 = index | (uint32_t)set << 16};
        uint64_t updated = submit(programs, NVME_IOCTL_IO64_CMD, execute, "execute");
        if (updated != elements) {
            fprintf(stderr, "step %d updated %llu elements\n", step, (unsigned long long)updated);
            return 1;
        }
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    const char *names[ARRAYS] = {"p", "g", "m", "v"};
    for (int array = 0; array < ARRAYS; array++) {
        if (array == 1)
            continue;
        transfer(MEMORY_READ, array * span, data, bytes);
        save(names[array], data, bytes);
    }
    printf("%d steps of %u parameters, %u commands, %.1f ms a step\n", steps, elements, commands,
           ((end.tv_sec - begin.tv_sec) * 1e3 + (end.tv_nsec - begin.tv_nsec) / 1e6) / steps);
    return 0;
}
