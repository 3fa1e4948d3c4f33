/*
 * A pretend libnvidia-ml.so.1, so that the real pynvml runs end to end on a machine without a GPU.
 *
 * Build:  cc -shared -fPIC -Wl,-soname,libnvidia-ml.so.1 -o libnvidia-ml.so.1 fake_nvml.c
 * Use:    put its folder first in LD_LIBRARY_PATH (pynvml opens the library by that name).
 *
 * What it reports comes from the text file named by FAKE_NVML_STATE, which is read again at every call, so that a test can change the
 * machine under a running sampler. Without a file: 8 idle H100s. One statement per line, unknown ones are an error:
 *
 *   driver 570.86.15              version of the driver
 *   init_error CODE               nvmlInit fails with this nvmlReturn_t (9 driver not loaded, 18 version mismatch)
 *   init_slow_ms MS               nvmlInit sleeps first (a driver without persistence mode takes seconds)
 *   say TEXT                      nvmlInit prints this on stdout
 *   count N                       number of GPUs (at most 16)
 *   count_error CODE              asking for that number fails
 *   name TEXT                     name of all GPUs
 *   gpu I name TEXT               name of one GPU
 *   gpu I FIELD VALUE             util (percent), used / total / reserved (MiB), temp (Celsius), power / limit (mW), mig (0 or 1),
 *                                 clock (MHz of the SMs), throttle (nvmlClocksEventReasons as a number)
 *   gpu I error CODE              every call about this GPU fails, also the one that gives its handle (15 GPU is lost)
 *   gpu I late_error CODE         its handle is given, every call with it fails
 *   gpu I slow_ms MS              every call with its handle sleeps first (a driver that hangs)
 *   gpu I hang 1                  every call with its handle waits until the file no longer says so (an uninterruptible call)
 *   gpu I nosupport FIELD         util, temp, power, procs, mem, mig, clock or throttle answer "not supported"; so does
 *                                 events: throttle by its new name only (a driver before 535)
 *   proc I PID MIB                a compute process (MIB -1: the driver does not tell)
 *   gproc I PID MIB               a graphics process
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    OK = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    INSUFFICIENT_SIZE = 7,
    ARGUMENT_VERSION_MISMATCH = 25,
    UNKNOWN = 999
};
enum { MAX_GPUS = 16, MAX_PROCESSES = 256, NAME_SIZE = 96 };

/* Bits of gpu.unsupported. */
enum { NO_UTIL = 1, NO_TEMP = 2, NO_POWER = 4, NO_PROCS = 8, NO_MEM = 16, NO_MIG = 32, NO_CLOCK = 64, NO_THROTTLE = 128, NO_EVENTS = 256 };

typedef struct {
    unsigned pid;
    long long mib;
} process_entry;

typedef struct {
    process_entry entry[MAX_PROCESSES];
    unsigned count;
} process_list;

typedef struct {
    char name[NAME_SIZE];
    long long util, used, total, reserved, temp, power, limit, mig, clock, throttle;
    long long error, late_error, slow_ms, hang;
    unsigned unsupported;
    process_list compute, graphics;
} gpu;

typedef struct {
    char driver[NAME_SIZE], say[NAME_SIZE];
    long long init_error, init_slow_ms, count_error;
    unsigned count;
    gpu gpus[MAX_GPUS];
} machine;

/* The driver hands out opaque pointers; ours point into this array, so that the offset is the index. */
static char handles[MAX_GPUS];
static int initialized;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static machine state;

/* ------------------------------------------------------------------------------------------------ the state file */

static void set_defaults(machine *m) {
    memset(m, 0, sizeof *m);
    m->count = 8;
    strcpy(m->driver, "570.86.15");
    for (int i = 0; i < MAX_GPUS; i++) {
        gpu *g = &m->gpus[i];
        strcpy(g->name, "NVIDIA H100 80GB HBM3");
        g->total = 81559;
        g->reserved = 556;
        g->used = 4;
        g->temp = 31;
        g->power = 70000;
        g->limit = 700000;
        g->clock = 1980;
    }
}

static unsigned unsupported_bit(const char *field) {
    static const struct { const char *name; unsigned bit; } table[] = {
        {"util", NO_UTIL}, {"temp", NO_TEMP}, {"power", NO_POWER}, {"procs", NO_PROCS}, {"mem", NO_MEM}, {"mig", NO_MIG},
        {"clock", NO_CLOCK}, {"throttle", NO_THROTTLE}, {"events", NO_EVENTS},
    };
    for (size_t k = 0; k < sizeof table / sizeof *table; k++)
        if (!strcmp(table[k].name, field)) return table[k].bit;
    return 0;
}

static long long *number_field(gpu *g, const char *field) {
    const struct { const char *name; long long *where; } table[] = {
        {"util", &g->util},   {"used", &g->used},   {"total", &g->total}, {"reserved", &g->reserved},
        {"temp", &g->temp},   {"power", &g->power}, {"limit", &g->limit}, {"mig", &g->mig},
        {"error", &g->error}, {"late_error", &g->late_error}, {"slow_ms", &g->slow_ms},
        {"clock", &g->clock}, {"throttle", &g->throttle}, {"hang", &g->hang},
    };
    for (size_t k = 0; k < sizeof table / sizeof *table; k++)
        if (!strcmp(table[k].name, field)) return table[k].where;
    return NULL;
}

static int add_process(process_list *list, unsigned pid, long long mib) {
    if (list->count == MAX_PROCESSES) return 0;
    list->entry[list->count++] = (process_entry){pid, mib};
    return 1;
}

/* `gpu I ...`: rest is what follows the index. */
static int read_gpu_line(gpu *g, const char *rest) {
    char field[32];
    long long value, *where;
    if (!strncmp(rest, "name ", 5)) return snprintf(g->name, sizeof g->name, "%s", rest + 5) > 0;
    if (sscanf(rest, "nosupport %31s", field) == 1) {
        g->unsupported |= unsupported_bit(field);
        return unsupported_bit(field) != 0;
    }
    if (sscanf(rest, "%31s %lld", field, &value) != 2 || !(where = number_field(g, field))) return 0;
    *where = value;
    return 1;
}

static int read_line(machine *m, const char *line) {
    unsigned i, pid;
    int used;
    long long mib;
    if (!*line || *line == '#') return 1;
    if (sscanf(line, "count %u", &i) == 1) return (m->count = i) <= MAX_GPUS;
    if (sscanf(line, "count_error %lld", &m->count_error) == 1) return 1;
    if (sscanf(line, "init_error %lld", &m->init_error) == 1) return 1;
    if (sscanf(line, "init_slow_ms %lld", &m->init_slow_ms) == 1) return 1;
    if (!strncmp(line, "say ", 4)) return snprintf(m->say, sizeof m->say, "%s", line + 4) > 0;
    if (!strncmp(line, "driver ", 7)) return snprintf(m->driver, sizeof m->driver, "%s", line + 7) > 0;
    if (!strncmp(line, "name ", 5)) {
        for (i = 0; i < MAX_GPUS; i++) snprintf(m->gpus[i].name, NAME_SIZE, "%s", line + 5);
        return 1;
    }
    if (sscanf(line, "gpu %u %n", &i, &used) == 1) return i < MAX_GPUS && read_gpu_line(&m->gpus[i], line + used);
    if (sscanf(line, "proc %u %u %lld", &i, &pid, &mib) == 3) return i < MAX_GPUS && add_process(&m->gpus[i].compute, pid, mib);
    if (sscanf(line, "gproc %u %u %lld", &i, &pid, &mib) == 3) return i < MAX_GPUS && add_process(&m->gpus[i].graphics, pid, mib);
    return 0;
}

/* A misspelt statement must not pass for an idle GPU: it ends the process, and the test sees that. */
static void read_state(machine *m) {
    char line[256];
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    set_defaults(m);
    if (!file) return;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (!read_line(m, line)) {
            fprintf(stderr, "fake_nvml: cannot read '%s' in %s\n", line, path);
            abort();
        }
    }
    fclose(file);
}

static void sleep_ms(long long ms) {
    struct timespec time = {ms / 1000, ms % 1000 * 1000000};
    if (ms > 0) nanosleep(&time, NULL);
}

/* The state as it is now. The lock is not held while a slow call sleeps. */
static machine current(void) {
    pthread_mutex_lock(&mutex);
    read_state(&state);
    machine copy = state;
    pthread_mutex_unlock(&mutex);
    return copy;
}

/* --------------------------------------------------------------------------------------------------- the library */

#define EXPORT __attribute__((visibility("default")))
typedef void *handle;

static long index_of(handle h) { return (char *)h - handles; }

/* Looks up the GPU of a handle, as every call on a device does first. */
static int enter(handle h, gpu *found) {
    machine m = current();
    long i = index_of(h);
    if (!initialized) return UNINITIALIZED;
    if (i < 0 || i >= (long)m.count) return INVALID_ARGUMENT;
    *found = m.gpus[i];
    sleep_ms(found->slow_ms);
    while (found->hang) {
        sleep_ms(10);
        *found = current().gpus[i];
    }
    return found->error ? (int)found->error : (int)found->late_error;
}

#define ENTER(h)                  \
    gpu g;                        \
    int code_ = enter((h), &g);   \
    if (code_ != OK) return code_

#define REQUIRE(bit) \
    if (g.unsupported & (bit)) return NOT_SUPPORTED

EXPORT int nvmlInitWithFlags(unsigned flags) {
    machine m = current();
    (void)flags;
    sleep_ms(m.init_slow_ms);
    if (*m.say) {
        puts(m.say);
        fflush(stdout);
    }
    if (m.init_error) return (int)m.init_error;
    initialized = 1;
    return OK;
}

EXPORT int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

EXPORT int nvmlShutdown(void) {
    if (!initialized) return UNINITIALIZED;
    initialized = 0;
    return OK;
}

EXPORT const char *nvmlErrorString(int code) {
    switch (code) {
    case OK: return "The operation was successful";
    case UNINITIALIZED: return "Uninitialized";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

EXPORT int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    machine m = current();
    if (!initialized) return UNINITIALIZED;
    snprintf(out, size, "%s", m.driver);
    return OK;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *out) {
    machine m = current();
    if (!initialized) return UNINITIALIZED;
    if (m.count_error) return (int)m.count_error;
    *out = m.count;
    return OK;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned i, handle *out) {
    machine m = current();
    if (!initialized) return UNINITIALIZED;
    if (i >= m.count) return INVALID_ARGUMENT;
    if (m.gpus[i].error) return (int)m.gpus[i].error;
    *out = handles + i;
    return OK;
}

EXPORT int nvmlDeviceGetIndex(handle h, unsigned *out) {
    ENTER(h);
    *out = (unsigned)index_of(h);
    return OK;
}

EXPORT int nvmlDeviceGetName(handle h, char *out, unsigned size) {
    ENTER(h);
    snprintf(out, size, "%s", g.name);
    return OK;
}

EXPORT int nvmlDeviceGetUUID(handle h, char *out, unsigned size) {
    ENTER(h);
    snprintf(out, size, "GPU-%08ld-0000-4000-8000-000000000000", index_of(h));
    return OK;
}

typedef struct { unsigned gpu, memory; } utilization;

/* In MIG mode the real driver answers "not supported" as well. */
EXPORT int nvmlDeviceGetUtilizationRates(handle h, utilization *out) {
    ENTER(h);
    REQUIRE(NO_UTIL);
    if (g.mig) return NOT_SUPPORTED;
    *out = (utilization){(unsigned)g.util, (unsigned)g.util / 2};
    return OK;
}

static unsigned long long bytes(long long mib) { return (unsigned long long)mib << 20; }

/* Version 1 counts what the driver keeps for itself as used; version 2 tells them apart. */
typedef struct { unsigned long long total, free, used; } memory_v1;

EXPORT int nvmlDeviceGetMemoryInfo(handle h, memory_v1 *out) {
    ENTER(h);
    REQUIRE(NO_MEM);
    *out = (memory_v1){bytes(g.total), bytes(g.total - g.used - g.reserved), bytes(g.used + g.reserved)};
    return OK;
}

typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;

EXPORT int nvmlDeviceGetMemoryInfo_v2(handle h, memory_v2 *out) {
    ENTER(h);
    REQUIRE(NO_MEM);
    if (out->version != 0x02000028) return ARGUMENT_VERSION_MISMATCH;
    out->total = bytes(g.total);
    out->reserved = bytes(g.reserved);
    out->free = bytes(g.total - g.used - g.reserved);
    out->used = bytes(g.used);
    return OK;
}

EXPORT int nvmlDeviceGetTemperature(handle h, int sensor, unsigned *out) {
    ENTER(h);
    REQUIRE(NO_TEMP);
    (void)sensor;
    *out = (unsigned)g.temp;
    return OK;
}

typedef struct { unsigned version, sensor; int temperature; } temperature_v1;

EXPORT int nvmlDeviceGetTemperatureV(handle h, temperature_v1 *out) {
    ENTER(h);
    REQUIRE(NO_TEMP);
    if (out->version != 0x0100000C) return ARGUMENT_VERSION_MISMATCH;
    out->temperature = (int)g.temp;
    return OK;
}

EXPORT int nvmlDeviceGetPowerUsage(handle h, unsigned *out) {
    ENTER(h);
    REQUIRE(NO_POWER);
    *out = (unsigned)g.power;
    return OK;
}

EXPORT int nvmlDeviceGetEnforcedPowerLimit(handle h, unsigned *out) {
    ENTER(h);
    REQUIRE(NO_POWER);
    *out = (unsigned)g.limit;
    return OK;
}

/* 1 is the clock of the SMs. */
EXPORT int nvmlDeviceGetClockInfo(handle h, int type, unsigned *out) {
    ENTER(h);
    REQUIRE(NO_CLOCK);
    if (type != 1) return INVALID_ARGUMENT;
    *out = (unsigned)g.clock;
    return OK;
}

EXPORT int nvmlDeviceGetCurrentClocksThrottleReasons(handle h, unsigned long long *out) {
    ENTER(h);
    REQUIRE(NO_THROTTLE);
    *out = (unsigned long long)g.throttle;
    return OK;
}

EXPORT int nvmlDeviceGetCurrentClocksEventReasons(handle h, unsigned long long *out) {
    ENTER(h);
    REQUIRE(NO_EVENTS);
    REQUIRE(NO_THROTTLE);
    *out = (unsigned long long)g.throttle;
    return OK;
}

EXPORT int nvmlDeviceGetMigMode(handle h, unsigned *now, unsigned *pending) {
    ENTER(h);
    REQUIRE(NO_MIG);
    *now = *pending = (unsigned)g.mig;
    return OK;
}

typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } process_info;

/* Called twice: with no room, to learn the number, then with room. */
static int give_processes(const process_list *list, unsigned *count, process_info *out) {
    unsigned room = *count;
    *count = list->count;
    if (list->count == 0) return OK;
    if (room < list->count || !out) return INSUFFICIENT_SIZE;
    for (unsigned k = 0; k < list->count; k++) {
        long long mib = list->entry[k].mib;
        out[k] = (process_info){list->entry[k].pid, mib < 0 ? ~0ULL : bytes(mib), ~0U, ~0U};
    }
    return OK;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(handle h, unsigned *count, process_info *out) {
    ENTER(h);
    REQUIRE(NO_PROCS);
    return give_processes(&g.compute, count, out);
}

EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(handle h, unsigned *count, process_info *out) {
    ENTER(h);
    REQUIRE(NO_PROCS);
    return give_processes(&g.graphics, count, out);
}
