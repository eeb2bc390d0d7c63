/* The functions of CUDA's driver that list devices: see cuda_runtime_stub.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuDeviceGetCount(int *n) { const char *set = getenv("STUB_GPUS"); *n = set ? atoi(set) : 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, "stub of sm_90", size); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
int cuDeviceTotalMem_v2(size_t *size, int device) { *size = 139ul << 30; return 0; }
int cuDeviceGetPCIBusId(char *id, int size, int device) { snprintf(id, size, "0000:%02X:00.0", device + 1); return 0; }
