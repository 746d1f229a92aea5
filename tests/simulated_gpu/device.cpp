// A CUDA device for a CPU build of torch: its memory is the host's, and its kernels are the CPU's, run at once.
//
// What is simulated is order: streams, events and waits move vector clocks (order.h), and every operation tells which
// memory it reads and writes. Torch's process groups on it are in process_groups.h, torch.cuda in torch_cuda.py.

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "order.h"
#include "process_groups.h"

namespace simulated {
namespace {

// ---- Streams and events ----

struct Event {
  Clock clock;
  bool is_captured = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::DeviceIndex index_of(Device device) {
    return c10::DeviceIndex(device.index() < 0 ? current_device : device.index());
  }
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    setDevice(device);
    return old;
  }
  Device getDevice() const override { return cuda(current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < device_count, "CUDA error: invalid device ordinal");
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index_of(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(device_count); }

  Stream getStream(Device device) const override { return current_stream(index_of(device)); }
  Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  Stream getNewStream(Device device, int) const override { return stream_of(index_of(device), next_stream++); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    Stream old = current_stream(stream.device_index());
    set_current_stream(stream);
    return old;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const Stream& stream) const override {
    Lock lock(mutex);
    not_while_capturing(actor_of(stream));
    follow(this_thread(), actor_of(stream));
  }
  bool isStreamCapturing(const Stream& stream) const override {
    Lock lock(mutex);
    return capturing.count(actor_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Lock lock(mutex);
    TORCH_CHECK(capturing.empty(), "CUDA error: operation not permitted when stream is capturing");
    std::vector<Actor> streams;
    for (auto& [actor, clock] : clocks)
      if (actor >= 0 && device_of(actor) == device) streams.push_back(actor);
    for (Actor stream : streams) follow(this_thread(), stream);
  }

  void record(void** event, const Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex);
    if (!*event) *event = new Event();
    enqueue(actor_of(stream));
    *static_cast<Event*>(*event) = {clocks[actor_of(stream)], capturing.count(actor_of(stream)) > 0};
  }
  void block(void* event, const Stream& stream) const override {
    Lock lock(mutex);
    if (!event) return;
    capture_behind(actor_of(stream), static_cast<Event*>(event)->is_captured);
    follow(actor_of(stream), static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    synchronizeEvent(event);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(mutex);
    if (event) follow(this_thread(), static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    Lock lock(mutex);
    record_use(data.get(), actor_of(stream));
  }
};

// What torch asks of CUDA beside devices and streams.
struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(device_count); }
  int getNumGPUs() const override { return device_count; }
  c10::DeviceIndex current_device() const override { return c10::DeviceIndex(simulated::current_device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { simulated::current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto old = current_device();
    if (device >= 0) simulated::current_device = device;
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* address) const override {
    Lock lock(mutex);
    auto it = pinned.upper_bound(uintptr_t(address));
    return it != pinned.begin() && uintptr_t(address) < (--it)->first + std::max<size_t>(it->second, 1);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  Device getDeviceFromPtr(void* address) const override {
    Lock lock(mutex);
    Block* block = block_at(address);
    return cuda(block ? device_of(block->born) : 0);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::kCPU);
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

// ---- Operations ----

// They make or change tensors, and touch no memory. Those whose results alias their arguments are found by schema.
const std::set<std::string> kTouchNothing = {
    "aten::as_strided", "aten::view",   "aten::_reshape_alias", "aten::unfold", "aten::view_as_real",
    "aten::_conj",      "aten::set_",   "aten::resize_",        "aten::empty",  "aten::view_as_complex",
    "aten::alias",      "aten::detach", "aten::empty_strided"};
// The host waits for their results.
const std::set<std::string> kWaits = {"aten::_local_scalar_dense", "aten::equal", "aten::nonzero",
                                      "aten::masked_select"};

bool touches(const c10::FunctionSchema& schema) {
  if (kTouchNothing.count(schema.name())) return false;
  for (auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return false;
  return true;
}

// The host waits for a stream, with sync_debug_mode's opinion of it. What stands for a GPU's kernel may, and nothing is
// ordered by it: the kernel itself would not.
void wait_on_host(Actor stream, const std::string& what) {
  if (may_wait) return;
  not_while_capturing(stream);
  TORCH_CHECK(sync_debug_mode < 2, "called a synchronizing CUDA operation (", what, ")");
  if (sync_debug_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", what, ")");
  follow(this_thread(), stream);
}

// Every operation without a kernel of its own here: the CPU's, on aliases of the same memory.
void run_on_cpu(const c10::OperatorHandle& operation, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const std::string& name = schema.name();
  const auto n = schema.arguments().size(), begin = stack->size() - n;
  Aliases aliases;
  std::vector<std::pair<Tensor, bool>> used;  // and whether it is written
  for (size_t i = 0; i < n; i++) {
    IValue& value = (*stack)[begin + i];
    auto* alias_info = schema.arguments()[i].alias_info();
    bool write = alias_info && alias_info->isWrite();
    auto take = [&](const Tensor& tensor) {
      if (tensor.defined() && tensor.is_cuda()) used.emplace_back(tensor, write);
      return aliases.on_host(tensor);
    };
    if (value.isDevice()) {
      if (value.toDevice().type() != CUDA) continue;
      aliases.set_device(cuda(Guard::index_of(value.toDevice())));
      value = Device(c10::kCPU);
    } else if (value.isTensor()) {
      value = take(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(take(tensor));
      value = c10::List<Tensor>(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<Tensor>(take(*tensor)) : tensor);
      value = list;
    } else if (value.isStorage()) {
      if (value.toStorage().device_type() == CUDA) value = aliases.on_host(value.toStorage());
    } else if (value.isGenerator() && value.toGenerator().device().type() == CUDA) {
      value = IValue();
    }
  }
  const bool touching = touches(schema);
  const Actor actor = actor_of(current_stream(aliases.device().index()));
  if (touching) {
    Tell tell;
    Lock lock(mutex);
    auto time = enqueue(actor);
    for (bool write : {false, true})
      for (auto& [tensor, writes] : used)
        if (writes == write && tensor.numel()) touch(tensor.data_ptr(), actor, time, write, name);
    if (kWaits.count(name)) wait_on_host(actor, name);
  }
  {
    c10::DeviceGuard guard(aliases.device());
    at::AutoDispatchBelowADInplaceOrView below;
    operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  aliases.follow_changes(name);
  auto give = [&](const Tensor& host) {
    Tensor tensor = aliases.on_device(host, name);
    if (touching && tensor.defined() && tensor.is_cuda() && tensor.numel()) {
      Lock lock(mutex);
      Block* block = block_at(tensor.data_ptr());
      if (block && block->writes.empty()) touch(tensor.data_ptr(), actor, clocks[actor][actor], true, name);
    }
    return tensor;
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = give(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(give(tensor));
      value = c10::List<Tensor>(list);
    }
  }
}

// On the source's device, or on the target's where the source is the host's, as CUDA copies. Between two devices the
// other one's stream waits before and after.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  Aliases aliases;
  Tensor into = aliases.on_host(self), from = aliases.on_host(source);
  if (self.numel()) {
    Tell tell;
    Lock lock(mutex);
    const Actor actor = actor_of(current_stream((source.is_cuda() ? source : self).get_device()));
    const Actor other = self.is_cuda() ? actor_of(current_stream(self.get_device())) : actor;
    if (other != actor) {
      follow(other, this_thread());
      follow(actor, other);
    }
    auto time = enqueue(actor);
    if (source.is_cuda()) touch(source.data_ptr(), actor, time, false, "aten::copy_");
    if (self.is_cuda()) touch(self.data_ptr(), actor, time, true, "aten::copy_");
    follow(other, actor);
    if (!(source.is_cuda() && self.is_cuda()) && !non_blocking) wait_on_host(actor, "aten::copy_");
  }
  at::AutoDispatchBelowADInplaceOrView below;
  into.copy_(from);
  return self;
}

void record_stream(Tensor& self, Stream stream) {
  Lock lock(mutex);
  record_use(self.storage().data(), actor_of(stream));
}

// ---- What torch_cuda.py calls ----

using Triple = std::tuple<int64_t, int64_t, int64_t>;  // of a stream: its id, its device's index, its device's type

Triple triple(const Stream& stream) {
  return {stream.id(), stream.device_index(), int64_t(CUDA)};
}

c10::DeviceIndex or_current(int device) {
  return c10::DeviceIndex(device < 0 ? current_device : device);
}

int exchange_device(int device) {
  int old = current_device;
  if (device >= 0) Guard().setDevice(cuda(device));
  return old;
}

void set_capturing(bool on) {
  Lock lock(mutex);
  auto actor = actor_of(current_stream(current_device));
  if (on) {
    capturing.insert(actor);
    return;
  }
  auto captured = std::exchange(capturing, {});
  for (Actor each : captured)
    TORCH_CHECK(each == actor || has_ended({each, clocks[each][each], ""}, clocks[actor]),
                "CUDA error: capturing stream has unjoined work");
}

// What a kernel that is no operation of torch's does to memory, on a stream of a device.
void touch_addresses(std::vector<uintptr_t> read, std::vector<uintptr_t> written, std::string what, int device,
                     int64_t id) {
  Tell tell;
  Lock lock(mutex);
  auto actor = actor_of(stream_of(device, id));
  auto time = enqueue(actor);
  for (auto address : read) touch(reinterpret_cast<void*>(address), actor, time, false, what);
  for (auto address : written) touch(reinterpret_cast<void*>(address), actor, time, true, what);
}

// The storage of which `view` is one gets another size.
void resize_storage(Tensor view, int64_t bytes) {
  auto storage = view.storage();
  if (int64_t(storage.nbytes()) == bytes) return;
  c10::DeviceGuard guard(view.device());
  auto made = allocator.allocate(bytes);
  memcpy(made.get(), storage.data(), std::min<size_t>(bytes, storage.nbytes()));
  storage.set_data_ptr_noswap(std::move(made));
  storage.set_nbytes(bytes);
}

// A function of Python's that any thread may call, also when the interpreter is gone.
template <class Call>
auto guarded(Call call) {
  return [call](auto&&... arguments) -> decltype(call(arguments...)) {
    if (!Py_IsInitialized()) return decltype(call(arguments...))();
    py::gil_scoped_acquire gil;
    try {
      return call(arguments...);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("the simulated device");
      return decltype(call(arguments...))();
    }
  };
}

void set_callbacks(py::object stack, py::object race) {
  auto* kept = new std::pair<py::object, py::object>(stack, race);  // never destroyed: the interpreter may be gone
  stack_now = guarded([kept] { return kept->first().cast<std::string>(); });
  on_race = guarded([kept](const std::string& text) { kept->second(text); });
}

}  // namespace
}  // namespace simulated

namespace c10d {

// For torch's own DDP, which measures steps.
struct SimulatedTimer : Timer {
  explicit SimulatedTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    return getTimeRef(end) - getTimeRef(start);
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SimulatedTimer)

}  // namespace c10d

using SimulatedGuard = simulated::Guard;
using SimulatedHooks = simulated::Hooks;

C10_REGISTER_GUARD_IMPL(CUDA, SimulatedGuard)
namespace at {
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)
}
TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&simulated::run_on_cpu>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", &simulated::copy_);
  library.impl("record_stream", &simulated::record_stream);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simulated;
  using Released = py::call_guard<py::gil_scoped_release>;
  c10::SetAllocator(CUDA, &allocator, 255);

  module.def("set_device_count", [](int count) { device_count = count; });
  module.def("get_device", [] { return current_device; });
  module.def("set_device", [](int device) { Guard().setDevice(cuda(device)); });
  module.def("exchange_device", &exchange_device);

  module.def("current_stream", [](int device) { return triple(current_stream(or_current(device))); });
  module.def("set_stream", [](int64_t id, int64_t device, int64_t) {
    current_device = int(device);
    set_current_stream(stream_of(int(device), id));
  });
  module.def("synchronize", [](int device) { Guard().synchronizeDevice(or_current(device)); }, Released());
  module.def("set_capturing", &set_capturing);
  module.def("is_capturing", [] { return Guard().isStreamCapturing(current_stream(current_device)); });
  module.def("set_sync_debug_mode", [](int mode) { sync_debug_mode = mode; });
  module.def("get_sync_debug_mode", [] { return int(sync_debug_mode); });
  module.def("allow_waits", [](bool on) { return std::exchange(may_wait, on); });

  module.def("this_thread", &this_thread);
  module.def("follow_thread", [](Actor other) {
    Lock lock(mutex);
    follow(this_thread(), other);
  });

  module.def("requested", [] { return int64_t(requested); });
  module.def("allocated", [] { return int64_t(allocated); });
  module.def("peak", [] { return int64_t(peak); });
  module.def("allocations", [] { return int64_t(allocations); });
  module.def("reset_peak", [] { peak = int64_t(allocated); });
  module.def("resize_storage", &resize_storage);

  module.def("set_callbacks", &set_callbacks);
  module.def("touch", &touch_addresses, Released());

  py::module::import("torch.distributed");
  py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(module, "Nccl")
      .def(py::init<int, int, c10::intrusive_ptr<c10d::Backend>, std::string>(), Released());
}
