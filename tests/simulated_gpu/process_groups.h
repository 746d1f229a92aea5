// Torch's process groups on the simulated device: a backend of CPU ranks does the work, on a stream of its own.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "device.h"

namespace simulated {

// A collective on a stream. Who waits for it lets the current stream wait; the host waits for a barrier alone.
struct StreamWork : c10d::Work {
  using Inner = c10::intrusive_ptr<c10d::Work>;

  StreamWork(int rank, c10d::OpType op, Inner inner, std::vector<Tensor> out, Actor stream)
      : Work(rank, op),
        inner_(std::move(inner)),
        out_(std::move(out)),
        stream_(stream),
        is_barrier_(op == c10d::OpType::BARRIER),
        future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<Device>{cuda(device_of(stream))})) {}

  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  std::vector<Tensor> result() override { return out_; }

  bool wait(std::chrono::milliseconds timeout) override {
    inner_->wait(timeout);
    complete();
    synchronize();
    return true;
  }

  void synchronize() override {
    Lock lock(mutex);
    const Actor current = actor_of(current_stream(device_of(stream_)));
    capture_behind(current, capturing.count(stream_));
    follow(current, stream_);
    if (is_barrier_) follow(this_thread(), stream_);
  }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    inner_->wait();
    complete();
    return future_;
  }

 private:
  Inner inner_;
  std::vector<Tensor> out_;
  Actor stream_;
  bool is_barrier_, is_complete_ = false;
  c10::intrusive_ptr<c10::ivalue::Future> future_;

  // The future records its events on the stream that is current: the collective's.
  void complete() {
    {
      Lock lock(mutex);
      if (std::exchange(is_complete_, true)) return;
    }
    const Stream old = current_stream(device_of(stream_));
    set_current_stream(stream_of(device_of(stream_), stream_id_of(stream_)));
    future_->markCompleted(IValue(out_));
    set_current_stream(old);
  }
};

struct Nccl : c10d::Backend {
  using Done = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<Tensor>;
  using Op = c10d::OpType;

  // `inner`: of the same ranks, for CPU tensors. `name`: what the backend calls itself.
  Nccl(int rank, int size, c10::intrusive_ptr<c10d::Backend> inner, std::string name)
      : Backend(rank, size), inner_(std::move(inner)), stream_(next_stream++), name_(std::move(name)) {}

  const std::string getBackendName() const override { return name_; }

  Done broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return in_place(Op::BROADCAST, "nccl:broadcast", tensors,
                    [&](auto& host) { return inner_->broadcast(host, options); });
  }

  Done allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return in_place(Op::ALLREDUCE, "nccl:allreduce", tensors,
                    [&](auto& host) { return all_reduce_on_host(host, options); });
  }

  Done allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return in_place(Op::ALLREDUCE_COALESCED, "nccl:allreduce", tensors,
                    [&](auto& host) { return inner_->allreduce_coalesced(host, options); });
  }

  Done reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return in_place(Op::REDUCE, "nccl:reduce", tensors, [&](auto& host) { return inner_->reduce(host, options); });
  }

  Done allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return between(Op::ALLGATHER, "nccl:allgather", out, in,
                   [&](auto& into, auto& from) { return inner_->allgather(into, from, options); });
  }

  // Of any shapes: gloo would cut the first dimension.
  Done _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& options) override {
    return between(Op::_ALLGATHER_BASE, "nccl:allgather", out, in, [&](auto& into, auto& from) {
      at::AutoDispatchBelowADInplaceOrView below;
      Tensor flat_into = into.view(-1), flat_from = from.view(-1);
      return inner_->_allgather_base(flat_into, flat_from, options);
    });
  }

  Done allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return between(Op::COALESCED, "nccl:allgather", out, in, [&](auto& into, auto& from) {
      return inner_->allgather_into_tensor_coalesced(into, from, options);
    });
  }

  Done gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    return between(Op::GATHER, "nccl:gather", out, in,
                   [&](auto& into, auto& from) { return inner_->gather(into, from, options); });
  }

  Done scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    return between(Op::SCATTER, "nccl:scatter", out, in,
                   [&](auto& into, auto& from) { return inner_->scatter(into, from, options); });
  }

  Done reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    return between(Op::REDUCE_SCATTER, "nccl:reduce_scatter", out, in,
                   [&](auto& into, auto& from) { return inner_->reduce_scatter(into, from, options); });
  }

  // By an all-reduce of all, of which each rank takes its part: gloo's own has no averages.
  Done _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return between(Op::_REDUCE_SCATTER_BASE, "nccl:reduce_scatter", out, in, [&](auto& into, auto& from) {
      at::AutoDispatchBelowADInplaceOrView below;
      Tensors sum{from.clone()};
      c10d::AllreduceOptions same;
      same.reduceOp = options.reduceOp;
      auto work = all_reduce_on_host(sum, same);
      work->wait();
      into.view(-1).copy_(sum[0].view(-1).narrow(0, getRank() * into.numel(), into.numel()));
      return work;
    });
  }

  Done alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes,
                     const c10d::AllToAllOptions& options) override {
    return between(Op::ALLTOALL_BASE, "nccl:alltoall", out, in, [&](auto& into, auto& from) {
      return inner_->alltoall_base(into, from, out_sizes, in_sizes, options);
    });
  }

  Done send(Tensors& tensors, int to, int tag) override {
    return run(Op::SEND, "nccl:send", tensors, {}, tensors, [&](Aliases& aliases) {
      auto host = aliases.on_host(tensors);
      return inner_->send(host, to, tag);
    });
  }

  Done recv(Tensors& tensors, int from, int tag) override {
    return run(Op::RECV, "nccl:recv", {}, tensors, tensors, [&](Aliases& aliases) {
      auto host = aliases.on_host(tensors);
      return inner_->recv(host, from, tag);
    });
  }

  Done barrier(const c10d::BarrierOptions& options) override {
    return run(Op::BARRIER, "nccl:barrier", {}, {}, {}, [&](Aliases&) { return inner_->barrier(options); });
  }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
  c10::StreamId stream_;  // on each device
  std::string name_;

  static Tensors flat(const Tensor& tensor) { return {tensor}; }
  static Tensors flat(const Tensors& tensors) { return tensors; }
  static Tensors flat(const std::vector<Tensors>& lists) {
    Tensors result;
    for (auto& list : lists) result.insert(result.end(), list.begin(), list.end());
    return result;
  }

  // Gloo has no averages.
  Done all_reduce_on_host(Tensors& host, c10d::AllreduceOptions options) {
    const bool mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (mean) options.reduceOp = c10d::ReduceOp::SUM;
    auto work = inner_->allreduce(host, options);
    if (mean) {
      work->wait();
      at::AutoDispatchBelowADInplaceOrView below;
      for (auto& tensor : host) tensor.div_(getSize());
    }
    return work;
  }

  // `call(host)` of the aliases of tensors that it reads and writes.
  template <class Call>
  Done in_place(Op op, const char* what, Tensors& tensors, Call call) {
    return run(op, what, tensors, tensors, tensors, [&](Aliases& aliases) {
      auto host = aliases.on_host(tensors);
      return call(host);
    });
  }

  // `call(into, from)` of the aliases of tensors, lists, or lists of lists.
  template <class Out, class In, class Call>
  Done between(Op op, const char* what, Out& out, In& in, Call call) {
    return run(op, what, flat(in), flat(out), flat(out), [&](Aliases& aliases) {
      auto into = aliases.on_host(out);
      auto from = aliases.on_host(in);
      return call(into, from);
    });
  }

  // `begin(aliases)` on this group's stream, behind the current one's work. Torch keeps the memory until it has ended.
  template <class Begin>
  Done run(Op op, const char* what, Tensors read, Tensors written, Tensors out, Begin begin) {
    Tensors all = read;
    all.insert(all.end(), written.begin(), written.end());
    int device = current_device;
    for (auto& tensor : all) {
      TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu");
      device = tensor.get_device();
    }
    const Actor stream = actor_of(stream_of(device, stream_));
    {
      Tell tell;
      Lock lock(mutex);
      const Actor current = actor_of(current_stream(device));
      follow(current, this_thread());
      capture_behind(stream, capturing.count(current));
      follow(stream, current);
      auto time = tick(stream);
      for (auto& tensor : read)
        if (tensor.numel()) touch(tensor.data_ptr(), stream, time, false, what);
      for (auto& tensor : written)
        if (tensor.numel()) touch(tensor.data_ptr(), stream, time, true, what);
      for (auto& tensor : all) record_use(tensor.data_ptr(), stream);
    }
    Aliases aliases;
    Done inner = begin(aliases);
    return c10::make_intrusive<StreamWork>(getRank(), op, std::move(inner), std::move(out), stream);
  }
};

}  // namespace simulated
