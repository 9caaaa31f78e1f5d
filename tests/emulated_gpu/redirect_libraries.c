// An audit library (LD_AUDIT, see rtld-audit(7)). The dynamic linker asks it for each library that
// a process loads, and it answers with the emulator's, from its own directory. So no file of the
// environment is replaced.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

static const char* const kEmulated[] = {"libcudart.so.13", "libcuda.so.1", "libnccl.so.2"};
enum { kCount = sizeof(kEmulated) / sizeof(kEmulated[0]), kMostBytes = 4096 };

static char paths[kCount][kMostBytes];

static const char* file_of(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash != NULL ? slash + 1 : path;
}

unsigned la_version(unsigned version) {
  (void)version;
  Dl_info self;
  if (dladdr(paths, &self) == 0) {
    return 0;  // the linker goes on without this library
  }
  const int directory = (int)(file_of(self.dli_fname) - self.dli_fname);
  for (int i = 0; i < kCount; ++i) {
    snprintf(paths[i], kMostBytes, "%.*s%s", directory, self.dli_fname, kEmulated[i]);
  }
  return LAV_CURRENT;
}

char* la_objsearch(const char* name, uintptr_t* cookie, unsigned flag) {
  (void)cookie;
  (void)flag;
  for (int i = 0; i < kCount; ++i) {
    if (strcmp(file_of(name), kEmulated[i]) == 0) {
      return paths[i];
    }
  }
  return (char*)name;
}
