/* The functions of CUDA's runtime that ONNX Runtime needs more from than success: one device of compute
   capability 9.0 (STUB_GPUS: more), memory of the host, and copies that are counted. Kernels are not run. */
#include <driver_types.h>
#include <stdlib.h>
#include <string.h>

static int device;
static long long copies[5][2]; /* by cudaMemcpyKind: number, bytes */

static int make_handle(void **handle) { *handle = malloc(64); return *handle ? 0 : 2; }
static void count(int kind, size_t size) {
    if (kind >= 0 && kind < 5) { copies[kind][0]++; copies[kind][1] += size; }
}

int cudaGetDeviceCount(int *n) { const char *set = getenv("STUB_GPUS"); *n = set ? atoi(set) : 1; return 0; }
int cudaGetDevice(int *ordinal) { *ordinal = device; return 0; }
int cudaSetDevice(int ordinal) { device = ordinal; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13000; return 0; }
int cudaMemGetInfo(size_t *available, size_t *total) { *available = 130ul << 30; *total = 139ul << 30; return 0; }
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int ordinal) {
    memset(p, 0, sizeof *p);
    strcpy(p->name, "stub of sm_90");
    p->major = 9;
    p->totalGlobalMem = 139ul << 30;
    p->multiProcessorCount = 132;
    p->warpSize = 32;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->maxThreadsPerMultiProcessor = 2048;
    p->maxBlocksPerMultiProcessor = 32;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 232448;
    p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->l2CacheSize = 50 << 20;
    p->concurrentKernels = 1;
    return 0;
}
int cudaDeviceGetAttribute(int *value, int attribute, int ordinal) {
    static const int known[][2] = {
        {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
        {cudaDevAttrWarpSize, 32}, {cudaDevAttrMultiProcessorCount, 132},
        {cudaDevAttrMaxThreadsPerMultiProcessor, 2048}, {cudaDevAttrComputeCapabilityMajor, 9},
        {cudaDevAttrComputeCapabilityMinor, 0}, {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
        {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448}};
    *value = 1;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (known[i][0] == attribute) *value = known[i][1];
    return 0;
}

int cudaMalloc(void **memory, size_t size) { *memory = aligned_alloc(256, (size + 511) / 256 * 256); return *memory ? 0 : 2; }
int cudaMallocHost(void **memory, size_t size) { return cudaMalloc(memory, size); }
int cudaHostAlloc(void **memory, size_t size, unsigned flags) { return cudaMalloc(memory, size); }
int cudaMallocFromPoolAsync(void **memory, size_t size, void *pool, void *stream) { return cudaMalloc(memory, size); }
int cudaFree(void *memory) { free(memory); return 0; }
int cudaFreeHost(void *memory) { free(memory); return 0; }
int cudaFreeAsync(void *memory, void *stream) { free(memory); return 0; }
int cudaMemPoolCreate(void **pool, void *properties) { return make_handle(pool); }
int cudaMemset(void *memory, int value, size_t size) { memset(memory, value, size); return 0; }
int cudaMemsetAsync(void *memory, int value, size_t size, void *stream) { memset(memory, value, size); return 0; }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { count(kind, size); memmove(to, from, size); return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { return cudaMemcpy(to, from, size, kind); }
/* long long[10]: the counts since the last call */
void stub_copies(void *result) { memcpy(result, copies, sizeof copies); memset(copies, 0, sizeof copies); }

/* CUDA graphs: what is captured is not run again, only counted: captures, launches */
static long long graphs[2];
int cudaStreamEndCapture(void *stream, void **graph) { graphs[0]++; return make_handle(graph); }
int cudaGraphInstantiate(void **executable, void *graph, unsigned long long flags) { return make_handle(executable); }
int cudaGraphLaunch(void *executable, void *stream) { graphs[1]++; return 0; }
void stub_graphs(void *result) { memcpy(result, graphs, sizeof graphs); }

int cudaStreamCreate(void **stream) { return make_handle(stream); }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { return make_handle(stream); }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaEventCreate(void **event) { return make_handle(event); }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return make_handle(event); }
int cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *memory) {
    memset(attributes, 0, sizeof *attributes);
    attributes->type = cudaMemoryTypeDevice;
    attributes->devicePointer = (void *)memory;
    return 0;
}
int cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *kernel) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024;
    attributes->binaryVersion = attributes->ptxVersion = 90;
    return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) { *blocks = 1; return 0; }
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long flags, int *status) {
    *function = 0;
    if (status) *status = 1; /* not found */
    return 0;
}
void **__cudaRegisterFatBinary(void *binary) { static void *handle[4]; return handle; }
const char *cudaGetErrorString(int code) { return "stub"; }
const char *cudaGetErrorName(int code) { return "stub"; }
