// The simulated device's state, its memory, and the aliases of its tensors that the CPU's kernels work on.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>

#include "order.h"

namespace simulated {

using at::Tensor;
using c10::Device;
using c10::IValue;
using c10::Storage;
using c10::Stream;

constexpr auto CUDA = c10::DeviceType::CUDA;

inline int device_count = 1;
inline thread_local int current_device = 0;
inline thread_local std::map<int, c10::StreamId> current_streams;  // by device; else the default one
inline std::atomic<c10::StreamId> next_stream{1};
inline std::set<Actor> capturing;            // streams: the one that was asked for, and those that have waited for it
inline std::atomic<int> sync_debug_mode{0};  // 0, 1: warn, 2: raise
inline thread_local bool may_wait = false;   // in what stands for a kernel
inline std::atomic<int64_t> requested{0}, allocated{0}, peak{0}, allocations{0};

inline Device cuda(int index) {
  return Device(CUDA, c10::DeviceIndex(index));
}

inline Stream stream_of(int device, c10::StreamId id) {
  return Stream(Stream::UNSAFE, cuda(device), id);
}

inline Stream current_stream(int device) {
  auto it = current_streams.find(device);
  return stream_of(device, it == current_streams.end() ? 0 : it->second);
}

inline void set_current_stream(const Stream& stream) {
  current_streams[stream.device_index()] = stream.id();
}

inline void not_while_capturing(Actor stream) {
  TORCH_CHECK(!capturing.count(stream), "CUDA error: operation not permitted when stream is capturing");
}

// `later` waits for work of a stream that was capturing then, or was not: a graph holds all of it or none.
inline void capture_behind(Actor later, bool was_captured) {
  if (!was_captured) {
    TORCH_CHECK(!capturing.count(later), "CUDA error: dependency created on uncaptured work in another stream");
  } else if (!capturing.empty()) {
    TORCH_CHECK(stream_id_of(later), "CUDA error: operation would make the legacy stream depend on a capturing stream");
    capturing.insert(later);
  }
}

// ---- Memory ----

inline Storage host_storage(c10::DataPtr data, size_t bytes) {
  return Storage(Storage::use_byte_size_t(), bytes, std::move(data), c10::GetAllocator(c10::kCPU), true);
}

// The host's memory, for as long as the device's tensors use it.
struct Held {
  Storage storage;
};

inline void let_go(void* context) {
  auto* held = static_cast<Held*>(context);
  released_at(held->storage.data());
  allocated -= int64_t(held->storage.nbytes());
  delete held;
}

// The host's memory as the device's, allocated now on its current stream.
inline c10::DataPtr as_device_memory(Storage storage, Device device, const std::string& what) {
  void* address = storage.mutable_data();
  if (!address) return {nullptr, device};
  const auto bytes = int64_t(storage.nbytes());
  {
    Tell tell;
    Lock lock(mutex);
    allocated_at(address, storage.nbytes(), actor_of(current_stream(device.index())), what);
    allocations++;
    requested += bytes;
    allocated += bytes;
    peak = std::max(int64_t(peak), int64_t(allocated));
  }
  return {address, new Held{std::move(storage)}, &let_go, device};
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    Storage storage = host_storage(c10::GetAllocator(c10::kCPU)->allocate(bytes), bytes);
    return as_device_memory(std::move(storage), cuda(current_device), "an allocation");
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* into, const void* from, size_t bytes) const override { memcpy(into, from, bytes); }
};

inline Allocator allocator;

// Pinned memory is the host's, of which it is known that it is pinned.
inline auto& pinned = *new std::map<uintptr_t, size_t>();  // bytes by address

inline void unpin(void* address) {
  {
    Lock lock(mutex);
    pinned.erase(uintptr_t(address));
  }
  free(address);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* address = malloc(std::max<size_t>(bytes, 1));
    Lock lock(mutex);
    pinned[uintptr_t(address)] = bytes;
    return {address, address, &unpin, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* into, const void* from, size_t bytes) const override { memcpy(into, from, bytes); }
};

inline PinnedAllocator pinned_allocator;

// ---- Aliases ----

// The tensors of one call: those of the device, and those of the host over the same memory.
class Aliases {
 public:
  Device device() const { return device_; }

  void set_device(Device device) {
    device_ = device;
    is_known_ = true;
  }

  Storage on_host(const Storage& storage) {
    auto it = host_.find(storage.unsafeGetStorageImpl());
    if (it != host_.end()) return it->second;
    // It keeps the device's memory: gloo's threads may be at work on it when nobody waits for them any more.
    void* address = const_cast<void*>(storage.data());
    c10::DataPtr data(
        address, new Storage(storage), [](void* kept) { delete static_cast<Storage*>(kept); }, Device(c10::kCPU));
    Storage made = host_storage(std::move(data), storage.nbytes());
    host_.emplace(storage.unsafeGetStorageImpl(), made);
    device_of_.emplace(made.unsafeGetStorageImpl(), storage);
    return made;
  }

  Tensor on_host(const Tensor& tensor) {
    if (!tensor.defined() || tensor.device().type() != CUDA) return tensor;
    TORCH_CHECK(!tensor.is_sparse(), "the simulated device has no sparse tensors");
    if (!is_known_) set_device(tensor.device());
    for (auto& [ours, host] : pairs_)
      if (ours.is_same(tensor)) return host;
    Tensor host = like(tensor, on_host(tensor.storage()), c10::DispatchKey::CPU);
    pairs_.emplace_back(tensor, host);
    return host;
  }

  std::vector<Tensor> on_host(const std::vector<Tensor>& tensors) {
    std::vector<Tensor> result;
    for (auto& tensor : tensors) result.push_back(on_host(tensor));
    return result;
  }

  std::vector<std::vector<Tensor>> on_host(const std::vector<std::vector<Tensor>>& lists) {
    std::vector<std::vector<Tensor>> result;
    for (auto& list : lists) result.push_back(on_host(list));
    return result;
  }

  // A result of the CPU's kernel; `what` made it.
  Tensor on_device(const Tensor& host, const std::string& what) {
    if (!host.defined() || host.device().type() != c10::kCPU) return host;
    TORCH_CHECK(!host.is_sparse(), "the simulated device has no sparse tensors");
    for (auto& [ours, other] : pairs_)
      if (other.is_same(host)) return ours;
    Tensor tensor = like(host, on_device(host.storage(), what), c10::DispatchKey::CUDA);
    pairs_.emplace_back(tensor, host);
    return tensor;
  }

  // The device's tensors get the sizes and storages that the call has given their aliases.
  void follow_changes(const std::string& what) {
    for (auto& [tensor, host] : pairs_) {
      const Storage& other = host.storage();
      Storage ours = on_device(other, what);
      if (ours.data() != other.data() || ours.nbytes() != other.nbytes()) move_memory(ours, other, what);
      auto* impl = tensor.unsafeGetTensorImpl();
      if (!tensor.storage().is_alias_of(ours)) impl->set_storage_keep_dtype(ours);
      if (tensor.sizes() != host.sizes() || tensor.strides() != host.strides() ||
          tensor.storage_offset() != host.storage_offset())
        impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

 private:
  Device device_ = cuda(0);
  bool is_known_ = false;
  std::unordered_map<c10::StorageImpl*, Storage> host_, device_of_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;  // of the device, of the host

  static Tensor like(const Tensor& tensor, Storage storage, c10::DispatchKey key) {
    Tensor made =
        at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (tensor.is_conj()) made._set_conj(true);
    if (tensor.is_neg()) made._set_neg(true);
    return made;
  }

  Storage on_device(const Storage& host, const std::string& what) {
    auto it = device_of_.find(host.unsafeGetStorageImpl());
    if (it != device_of_.end()) return it->second;
    c10::DataPtr data = as_device_memory(host, device_, what);
    Storage made(Storage::use_byte_size_t(), host.nbytes(), std::move(data), &allocator, true);
    device_of_.emplace(host.unsafeGetStorageImpl(), made);
    return made;
  }

  // The alias was resized: its memory becomes the device's.
  void move_memory(Storage& ours, const Storage& host, const std::string& what) {
    const size_t bytes = host.nbytes();
    c10::DataPtr alias(const_cast<void*>(host.data()), Device(c10::kCPU));
    Storage kept = host_storage(const_cast<Storage&>(host).set_data_ptr(std::move(alias)), bytes);
    if (kept.data() != ours.data()) ours.set_data_ptr_noswap(as_device_memory(kept, device_, what));
    ours.set_nbytes(bytes);
  }
};

}  // namespace simulated
