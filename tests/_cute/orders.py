"""Small kernels whose threads pass shared memory to each other, for compute-sanitizer: ``python orders.py``.

All but `unordered` and `twice` are right by the PTX memory model, each for the reason beside it. Warps 0..3 are the
writers, 4..7 the readers, in CTAs of 256 threads; the named barriers join warps 0..7 of 12.
"""

from __future__ import annotations

import sys

SOURCE = r"""
__device__ unsigned at(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void start(unsigned long long* m, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at(m)), "r"(arrivals));
}
__device__ void arrive(unsigned long long* m) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at(m)) : "memory");
}
__device__ void wait(unsigned long long* m, int parity) {
  for (unsigned done = 0; !done;)
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(at(m)), "r"(parity) : "memory");
}
__device__ bool elected() {
  unsigned yes;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(yes));
  return yes;
}
__device__ void meet_lanes() { asm volatile("bar.warp.sync 0xffffffff;" ::: "memory"); }
__device__ int warp() { return __shfl_sync(0xffffffff, (int)threadIdx.x / 32, 0); }

// every lane arrives: each store is before an arrival of its own thread
extern "C" __global__ void lanes_arrive(float* out) {
  __shared__ float s[128];
  __shared__ unsigned long long full;
  int t = threadIdx.x;
  if (t == 0) start(&full, 128);
  __syncthreads();
  if (warp() < 4) {
    s[t] = t;
    meet_lanes();
    arrive(&full);
  } else {
    wait(&full, 0);
    out[t - 128] = s[255 - t];
  }
}

// one lane arrives for its warp: each store is before bar.warp.sync, that is before the arrival (release), that before
// the wait that returns (acquire). Machine code has no instruction for the barrier of a warp known to be together.
extern "C" __global__ void warps_arrive(float* out) {
  __shared__ float s[128];
  __shared__ unsigned long long full;
  int t = threadIdx.x;
  if (t == 0) start(&full, 4);
  __syncthreads();
  if (warp() < 4) {
    s[t] = t;
    meet_lanes();
    if (elected()) arrive(&full);
  } else {
    wait(&full, 0);
    out[t - 128] = s[255 - t];
  }
}

// the way back: one lane frees a slot for its warp, another warp hands it on
extern "C" __global__ void warps_free(float* out) {
  __shared__ float s[128];
  __shared__ unsigned long long full, empty;
  int t = threadIdx.x;
  if (t == 0) { start(&full, 1); start(&empty, 4); }
  __syncthreads();
  if (warp() < 4) {
    for (int i = 0; i < 2; i++) {
      wait(&full, i);
      s[t] = t;
      asm volatile("bar.sync 1, 128;" ::: "memory");
      out[t] = s[127 - t];
      meet_lanes();
      if (elected()) arrive(&empty);
    }
  } else if (warp() == 4) {
    for (int i = 0; i < 2; i++) {
      if (i) wait(&empty, 0);
      if (elected()) arrive(&full);
    }
  }
}

// nothing orders the two sides
extern "C" __global__ void unordered(float* out) {
  __shared__ float s[128];
  int t = threadIdx.x;
  if (warp() < 4) s[t] = t;
  else out[t - 128] = s[255 - t];
}

// two warps store the same values
extern "C" __global__ void twice(float* out) {
  __shared__ float s[32];
  int t = threadIdx.x;
  if (t < 64) {
    s[t % 32] = t % 32;
    meet_lanes();
    out[t] = s[31 - t % 32];
  }
}

// barrier 1 joins warps 0..7 and orders everything; warps 4..7 meet at barrier 2 too; warps 8..11 wait for an mbarrier
// till the end
extern "C" __global__ void second_barrier(float* out) {
  __shared__ float s[256], u[128];
  __shared__ unsigned long long end;
  int t = threadIdx.x, w = warp();
  if (t == 0) start(&end, 1);
  __syncthreads();
  if (w < 8) {
    if (w >= 4) {
      u[t - 128] = t;
      asm volatile("bar.sync 2, 128;" ::: "memory");
      out[t] = u[255 - t];
    }
    asm volatile("bar.sync 1, 256;" ::: "memory");
    s[t] = t;
    asm volatile("bar.sync 1, 256;" ::: "memory");
    out[t] = s[255 - t];
    if (t == 0) arrive(&end);
  } else {
    wait(&end, 0);
  }
}

// warps 0..3 meet at barrier 1; then all meet, and warps 4..7, who waited there, read what those stored
extern "C" __global__ void some_meet_before(float* out) {
  __shared__ float s[128], u[128];
  int t = threadIdx.x;
  for (int i = 0; i < 8; i++) {
    if (warp() < 4) {
      u[t] = 127 - t;
      asm volatile("bar.sync 1, 128;" ::: "memory");
      float x = u[127 - t];
      asm volatile("bar.sync 1, 128;" ::: "memory");
      s[t] = x;
    }
    __syncthreads();
    if (warp() >= 4) out[t - 128] = s[255 - t];
    __syncthreads();
  }
}
"""

THREADS = {
    "lanes_arrive": 256,
    "warps_arrive": 256,
    "warps_free": 256,
    "unordered": 256,
    "twice": 64,
    "second_barrier": 384,
    "some_meet_before": 256,
}


def main() -> None:
    import torch

    for name, threads in THREADS.items():
        kernel = torch.cuda._compile_kernel(SOURCE, name)
        out = torch.full((256,), -1.0, device="cuda")
        kernel(grid=(1, 1, 1), block=(threads, 1, 1), args=[out])
        torch.cuda.synchronize()
        n = 256 if "second" in name else threads // 2 if threads > 64 else 32
        want = torch.arange(n - 1.0, -1.0, -1.0, device="cuda")
        sys.stdout.write(f"{name} {'right' if torch.equal(out[:n], want) else 'WRONG'}\n")


if __name__ == "__main__":
    main()
