// An accelerator for tests, behind torch's PrivateUse1: memory of its own, streams, events and
// pinned memory. Operations compute on the CPU as soon as they are launched. Copies to and from
// pinned memory with non_blocking run as late as streams and events allow, and what operations have
// written to pinned memory is there as late. Every access to the device's memory is checked to
// happen after those of other streams before it (vector clocks): what an order of streams leaves to
// chance on a GPU is counted here as a hazard, each time.

#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "accelerator_clocks.h"

namespace {

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (!bytes) return {nullptr, nullptr, &c10::detail::deleteNothing, device()};
    char* data = static_cast<char*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    std::memset(data, 0xff, bytes);
    Block& block = blocks[data];
    block.bytes = bytes;
    // It may have been another's until now, in the order of the stream that asks.
    block.stream = current;
    block.access.write[current] = launch(current);
    device_bytes += bytes;
    peak_bytes = std::max(peak_bytes, device_bytes);
    return {data, data, &release, device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator)

void forget_pinned(void* data) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  // It is handed out again at once, but after copies that used it, and what else their streams did.
  Block& block = pinned.at(static_cast<char*>(data));
  check(block.access.write, kHost, "pinned memory freed after a write", block.recorded);
  check(block.access.read, kHost, "pinned memory freed after a read", block.recorded);
  for (int stream = 0; stream < kStreams; stream++) run_all(stream);
  pinned.erase(static_cast<char*>(data));
}

void unpin(void* data) {
  forget_pinned(data);
  std::free(data);
}

// Memory that somebody else has: pinned until it is not.
void pin(const at::Tensor& memory, bool begins) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  char* data = static_cast<char*>(memory.mutable_data_ptr());
  if (begins) pinned[data].bytes = memory.nbytes();
  else forget_pinned(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    char* data = static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
    std::memset(data, 0xff, bytes);
    pinned[data].bytes = bytes;
    return {data, data, &unpin, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) { return block_of(pinned, data) != nullptr; }

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), bytes);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream stream(int index) const { return c10::Stream(c10::Stream::UNSAFE, device(), index); }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    int made = next_stream;
    next_stream = next_stream % (kStreams - 1) + 1;
    return stream(made);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override {
    return getNewStream(d, 0);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    int before = current;
    current = static_cast<int>(to.id());
    return stream(before);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& on, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (!*event) *event = new Event;
    auto* found = static_cast<Event*>(*event);
    found->stream = static_cast<int>(on.id());
    found->position = queues[found->stream].added;
    launch(found->stream);
    found->clock = clocks[found->stream];
    found->when = std::chrono::steady_clock::now();  // operations have computed when launched
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto passed = static_cast<Event*>(second)->when - static_cast<Event*>(first)->when;
    return std::chrono::duration<double, std::milli>(passed).count();
  }
  void block(void* event, const c10::Stream& on) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto* found = static_cast<Event*>(event);
    if (!found || found->stream < 0) return;
    int waits = static_cast<int>(on.id()), stream = found->stream;
    uint64_t position = found->position;
    if (waits != stream) add(waits, [=] { run_until(stream, position); });
    launch(waits);
    merge(clocks[waits], found->clock);
  }
  bool queryEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto* found = static_cast<Event*>(event);
    if (!found || found->stream < 0) return true;
    if (queues[found->stream].done < found->position) return false;
    merge(clocks[kHost], found->clock);  // the host has seen it
    return true;
  }
  void synchronizeEvent(void* event) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    auto* found = static_cast<Event*>(event);
    if (!found || found->stream < 0) return;
    run_until(found->stream, found->position);
    merge(clocks[kHost], found->clock);
  }
  bool queryStream(const c10::Stream& on) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    return queues[on.id()].tasks.empty();
  }
  void synchronizeStream(const c10::Stream& on) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    run_all(static_cast<int>(on.id()));
    merge(clocks[kHost], clocks[on.id()]);
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    for (int stream = 0; stream < kStreams; stream++) {
      run_all(stream);
      merge(clocks[kHost], clocks[stream]);
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& on) const override {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    if (Block* block = block_of(blocks, data.get())) block->recorded.insert(on.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!tensor.is_privateuseone()) return tensor;
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), tensor.storage().nbytes(),
      c10::DataPtr(tensor.storage().mutable_data(), c10::Device(c10::DeviceType::CPU)), nullptr,
      false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                    tensor.storage_offset());
  made._set_neg(tensor.is_neg());
  return made;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  int stream = current;
  launch(stream);
  access(self.const_data_ptr(), stream, false);
  access(to.const_data_ptr(), stream, true);
  bool down = self.is_privateuseone() && to.is_cpu(), up = self.is_cpu() && to.is_privateuseone();
  copies_to_device += up;
  copies_to_host += down;
  const void* host = down ? to.const_data_ptr() : self.const_data_ptr();
  bool late = non_blocking && (up || down) && is_pinned(host) && self.is_contiguous() &&
      to.is_contiguous() && self.dtype() == to.dtype() && self.sizes() == to.sizes();
  if (late) {
    void* target = to.mutable_data_ptr();
    const void* source = self.const_data_ptr();
    size_t bytes = self.nbytes();
    block_of(pinned, host)->recorded.insert(stream);
    add(stream, [=] { std::memcpy(target, source, bytes); }, up ? target : source);
    late_copies++;
    return to;
  }
  run_all(stream);
  if (computing && is_pinned(to.const_data_ptr())) {  // a kernel has written to the host's memory
    add(stream, [target = on_host(to), result = self.clone()] { target.copy_(result); });
    return to;
  }
  if ((down || up) && !computing) merge(clocks[kHost], clocks[stream]);  // it blocks the host
  on_host(to).copy_(on_host(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  at::native::resize_(to, self.sizes(), std::nullopt);
  return copy_from(self, to, false);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset,
                        c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(source), offset, size, stride);
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::cpu::as_strided(self, size, stride, offset);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size,
                         std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return at::cpu::view(self, size);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::_reshape_alias(self, size, stride);
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& each : value.toTensorVector()) visit(each);
  } else if (value.isList()) {
    for (const c10::IValue& each : value.toListRef()) each_tensor(each, visit);
  }
}

// Any other operation: on the CPU, when all before it in its stream has run.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    int stream = current;
    run_all(stream);
    launch(stream);
    for (size_t i = 0; i < arguments.size(); i++) {
      const auto* alias = arguments[i].alias_info();
      bool writes = alias && alias->isWrite();
      each_tensor((*stack)[stack->size() - arguments.size() + i], [&](const at::Tensor& each) {
        if (each.is_privateuseone() && each.storage()) access(each.const_data_ptr(), stream, writes);
      });
    }
  }
  bool before = std::exchange(computing, true);
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    computing = before;
    throw;
  }
  computing = before;
}

// A tensor of the device on the memory of a pinned one, or of a part of one of the device.
at::Tensor mapped(const at::Tensor& flat) {
  if (flat.is_privateuseone()) {
    std::lock_guard<std::recursive_mutex> lock(mutex);
    char* data = static_cast<char*>(flat.mutable_data_ptr());
    TORCH_CHECK(block_of(blocks, data), "it is no memory of the device");
    auto [place, is_new] = places.try_emplace(data);
    if (is_new) place->second = {flat.nbytes(), block_of(blocks, data)->access};
  } else {
    TORCH_CHECK(is_pinned(flat.const_data_ptr()), "it is not pinned");
  }
  auto* keeps = new at::Tensor(flat);
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), flat.nbytes(),
      c10::DataPtr(flat.mutable_data_ptr(), keeps,
                   [](void* kept) { delete static_cast<at::Tensor*>(kept); }, device()),
      nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), flat.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(flat.sizes(), flat.strides());
  return made;
}

void record_stream(at::Tensor& self, c10::Stream on) {
  c10::impl::getDeviceGuardImpl(kType)->recordDataPtrOnStream(self.storage().data_ptr(), on);
}

std::vector<std::string> take_hazards() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  std::vector<std::string> found;
  found.swap(hazards);
  return found;
}

std::vector<int64_t> counts() {
  std::lock_guard<std::recursive_mutex> lock(mutex);
  return {copies_to_device, copies_to_host, late_copies, device_bytes, peak_bytes};
}

Hooks hooks;
struct Registered {
  Registered() { at::RegisterPrivateUse1HooksInterface(&hooks); }
} registered;

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("resize_", resize);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("record_stream", record_stream);
}

// As CUDA's copies do: they negate by themselves, and late ones do it before what is copied is there.
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY(nearstep_accelerator, m) {
  m.def("hazards() -> str[]", take_hazards);
  m.def("counts() -> int[]", counts);
  m.def("pin(Tensor memory, bool begins) -> ()", pin);
  m.def("mapped(Tensor(a) flat) -> Tensor(a)", mapped);
}
