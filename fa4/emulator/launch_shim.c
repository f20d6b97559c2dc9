/* The CUDA calls that a compiled CuTe-DSL host function makes, answered for the emulator.
 *
 * Linked into the same library as the host function, whose calls bind to these definitions inside
 * the library: the rest of the process, which may use a real GPU, is not touched. Calls that need
 * an answer go to Python through the two functions that fa4_emulator_connect is given.
 *
 * The PTX text of the kernels is in the library too (file kernel.ptx of the build folder), so the
 * text that is emulated is always the one that this host function was compiled with.
 *
 * Freestanding: no headers, no start-up files, no C library. Functions return CUDA error codes.
 */

typedef int (*launch_fn)(const void *config, const char *kernel, void **params);
typedef int (*attribute_fn)(int *value, int attribute);
typedef int (*library_fn)(void **library);
typedef int (*device_fn)(void **library, int device);
typedef void (*error_fn)(const char *kind, const char *message);

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3 };
enum { MAX_KERNELS = 32, MAX_NAME = 4096, STATIC_SHARED_BYTES = 1 };

#define EXPORTED __attribute__((visibility("default")))

__asm__(".pushsection .rodata\n"
        ".globl fa4_emulator_ptx\n"
        "fa4_emulator_ptx:\n"
        ".incbin \"kernel.ptx\"\n"
        ".byte 0\n"
        ".popsection\n");
extern __attribute__((visibility("hidden"))) const char fa4_emulator_ptx[];

static launch_fn on_launch;
static attribute_fn on_attribute;
static char kernels[MAX_KERNELS][MAX_NAME]; /* a kernel's handle is its name, kept here */
static int num_kernels;
static char the_library; /* its address is the handle */

EXPORTED void fa4_emulator_connect(launch_fn launch, attribute_fn attribute) {
  on_launch = launch;
  on_attribute = attribute;
}

EXPORTED const char *fa4_emulator_text(void) { return fa4_emulator_ptx; }

static int same(const char *a, const char *b) {
  while (*a && *a == *b) a++, b++;
  return *a == *b;
}

/* Once a library: load it, prepare every device (there is one), keep the handle. */
int cuda_dialect_init_library_once(void **slot, library_fn load, device_fn prepare,
                                   error_fn set_error) {
  void *library = 0;
  int error;
  if (*slot) return SUCCESS;
  error = load(&library);
  if (!error) error = prepare(&library, 0);
  if (error) {
    set_error("RuntimeError", "The emulator could not load the kernels of a host function.");
    return error;
  }
  *slot = library;
  return SUCCESS;
}

void cuda_dialect_unload_library_once(void **slot) { *slot = 0; }

int _cudaLibraryLoadData(void **library) {
  *library = &the_library;
  return SUCCESS;
}

int _cudaLibraryGetKernel(const char **kernel, void *library, const char *name) {
  int i, length = 0;
  (void)library;
  for (i = 0; i < num_kernels; i++) {
    if (same(kernels[i], name)) {
      *kernel = kernels[i];
      return SUCCESS;
    }
  }
  while (name[length]) length++;
  if (num_kernels == MAX_KERNELS || length >= MAX_NAME) return INVALID_VALUE;
  for (i = 0; i <= length; i++) kernels[num_kernels][i] = name[i];
  *kernel = kernels[num_kernels++];
  return SUCCESS;
}

int _cudaLaunchKernelEx(const void *config, const char *kernel, void **params) {
  return on_launch ? on_launch(config, kernel, params) : NOT_INITIALIZED;
}

int _cudaDeviceGetAttribute(int *value, int attribute, int device) {
  (void)device;
  return on_attribute ? on_attribute(value, attribute) : NOT_INITIALIZED;
}

/* The host code only subtracts this from the device's limit, to raise the dynamic one. The
 * emulator adds up what a launch asks for by itself. */
int _cuKernelGetAttribute(int *value, int attribute, const char *kernel, int device) {
  (void)kernel, (void)device;
  *value = 0;
  return attribute == STATIC_SHARED_BYTES ? SUCCESS : INVALID_VALUE;
}

int _cudaFuncSetAttribute(const char *kernel, int attribute, int value) {
  (void)kernel, (void)attribute, (void)value;
  return SUCCESS;
}

int _cudaKernelSetAttributeForDevice(const char *kernel, int attribute, int value, int device) {
  (void)kernel, (void)attribute, (void)value, (void)device;
  return SUCCESS;
}

int _cudaGetDevice(int *device) {
  *device = 0;
  return SUCCESS;
}

int _cudaGetDeviceCount(int *count) {
  *count = 1;
  return SUCCESS;
}

int _cudaSetDevice(int device) { return device == 0 ? SUCCESS : INVALID_VALUE; }
