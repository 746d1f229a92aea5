// Who happens before whom on the simulated device, and a detector of races between streams.
//
// An actor is a stream of a device, or a thread of the host. Each has a vector clock: how much of every actor's work
// has ended before what it does next. Each block of memory remembers its last write and the reads since then. Work on
// a stream follows what the enqueuing thread knows of; a thread learns of a stream's work where it waits for it.
#pragma once

#include <c10/core/Stream.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace simulated {

constexpr int kStreamBits = 40;  // an actor of a device: its index above, the stream's number below
using Actor = int64_t;           // of the host: below 0
using Clock = std::unordered_map<Actor, uint64_t>;

// What outlives the process's last tensor is never destroyed.
inline std::recursive_mutex& mutex = *new std::recursive_mutex();
inline auto& clocks = *new std::unordered_map<Actor, Clock>();
inline auto& stack_now = *new std::function<std::string()>();           // where Python is
inline auto& on_race = *new std::function<void(const std::string&)>();  // called without the mutex
using Lock = std::lock_guard<std::recursive_mutex>;

inline Actor actor_of(const c10::Stream& stream) {
  return (Actor(stream.device_index()) << kStreamBits) | stream.id();
}

inline int device_of(Actor stream) {
  return int(stream >> kStreamBits);
}

inline c10::StreamId stream_id_of(Actor stream) {
  return stream & ((Actor(1) << kStreamBits) - 1);
}

inline Actor this_thread() {
  static std::atomic<Actor> next{1};
  thread_local Actor mine = -(next++);
  return mine;
}

// New work of an actor; returns its time.
inline uint64_t tick(Actor actor) {
  return ++clocks[actor][actor];
}

// `later` waits for all that `earlier` says.
inline void follow(Actor later, const Clock& earlier) {
  Clock& mine = clocks[later];
  for (auto& [actor, time] : earlier) mine[actor] = std::max(mine[actor], time);
  ++mine[later];  // a clock that has changed has another time of its own
}

inline void follow(Actor later, Actor earlier) {
  if (later == earlier) return;
  const Clock& clock = clocks[earlier];
  auto time = clock.find(earlier);
  auto known = clocks[later].find(earlier);
  if (time == clock.end() || (known != clocks[later].end() && known->second == time->second)) return;
  follow(later, clock);
}

// New work on a stream, enqueued by this thread.
inline uint64_t enqueue(Actor stream) {
  follow(stream, this_thread());
  return tick(stream);
}

// ---- Blocks of memory ----

struct Access {
  Actor actor;
  uint64_t time;
  std::string what;
};

struct Block {
  size_t bytes;
  Actor born;  // the stream that was current when it was allocated
  std::string what;
  std::vector<Access> writes, reads;  // the last write, and each actor's last read since
  std::set<Actor> recorded;           // by record_stream
};

// Memory that was let go of while other streams may use it.
struct Released {
  std::string what, stack;
  std::vector<Access> uses;
};

inline auto& blocks = *new std::map<uintptr_t, Block>();
inline auto& released = *new std::unordered_map<Actor, std::vector<Released>>();  // by the stream that may take it anew
inline thread_local std::vector<std::string> found;

inline void report(const std::string& race) {
  found.push_back(race);
}

// At the end of a scope, tells of what was found in it: Python may not be entered under the mutex.
struct Tell {
  ~Tell() {
    auto mine = std::move(found);
    found.clear();
    for (auto& race : mine)
      if (on_race) on_race(race);
  }
};

inline Block* block_at(const void* address) {
  auto it = blocks.upper_bound(uintptr_t(address));
  if (it == blocks.begin()) return nullptr;
  --it;
  return uintptr_t(address) < it->first + std::max<size_t>(it->second.bytes, 1) ? &it->second : nullptr;
}

inline bool has_ended(const Access& access, const Clock& now) {
  auto it = now.find(access.actor);
  return it != now.end() && it->second >= access.time;
}

// A read or a write of memory in an actor's work of `time`.
inline void touch(const void* address, Actor actor, uint64_t time, bool write, const std::string& what) {
  Block* block = block_at(address);
  if (!block) return;
  const Clock& now = clocks[actor];
  auto check = [&](const std::vector<Access>& earlier, const char* kind) {
    for (auto& access : earlier)
      if (!has_ended(access, now))
        report((write ? "write by " : "read by ") + what + " does not follow " + kind + " by " + access.what);
  };
  check(block->writes, "write");
  if (write) {
    check(block->reads, "read");
    block->reads.clear();
    block->writes = {{actor, time, what}};
    return;
  }
  for (auto& read : block->reads)
    if (read.actor == actor) {
      read = {actor, time, what};
      return;
    }
  block->reads.push_back({actor, time, what});
}

// Memory is allocated with `stream` current: it may be what was let go of there.
inline void allocated_at(const void* address, size_t bytes, Actor stream, const std::string& what) {
  auto it = released.find(stream);
  if (it != released.end()) {
    follow(stream, this_thread());
    for (auto& each : it->second)
      for (auto& use : each.uses)
        if (!has_ended(use, clocks[stream])) {
          report("memory of " + each.what + " may be taken anew while " + use.what +
                 " uses it on another stream, without record_stream; it was let go of at\n" + each.stack +
                 "\n  taken at");
          break;
        }
    released.erase(it);
  }
  blocks[uintptr_t(address)] = Block{bytes, stream, what, {}, {}, {}};
}

// Memory is let go of: its next owner uses it behind what the stream that it was born on holds then.
inline void released_at(const void* address) {
  Released one;
  Actor born;
  {
    Lock lock(mutex);
    auto it = blocks.find(uintptr_t(address));
    if (it == blocks.end()) return;
    Block& block = it->second;
    born = block.born;
    one.what = block.what;
    std::set<Actor> ends = block.recorded;  // what these hold now has ended before the memory is taken anew
    ends.insert({born, this_thread()});
    for (auto* list : {&block.writes, &block.reads})
      for (auto& use : *list)
        if (std::none_of(ends.begin(), ends.end(),
                         [&](Actor each) { return use.actor == each || has_ended(use, clocks[each]); }))
          one.uses.push_back(use);
    blocks.erase(it);
  }
  if (one.uses.empty()) return;
  if (stack_now) one.stack = stack_now();
  Lock lock(mutex);
  released[born].push_back(std::move(one));
}

inline void record_use(const void* address, Actor stream) {
  if (Block* block = block_at(address)) block->recorded.insert(stream);
}

}  // namespace simulated
