// A library that uses NCCL, as libtorch_cuda.so does.
extern "C" int ncclGetVersion(int* version);

extern "C" __attribute__((visibility("default"))) int version_that_torch_uses() {
  int version = 0;
  ncclGetVersion(&version);
  return version;
}
