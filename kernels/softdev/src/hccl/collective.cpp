// SPDX-License-Identifier: Apache-2.0
// Collectives: argument checks here, the work as a task on the stream. Data goes through chunks of
// shared memory that belong to the group and not to the windows.
#include <algorithm>
#include <cstring>

#include "comm.h"
#include "reduce.h"

namespace xsd {
namespace {

enum class Kind : uint64_t {
  kAllReduce = 1,
  kReduceScatter,
  kBroadcast,
  kAllGather,
  kAllToAll,
  kBarrier
};

struct Op {
  Kind kind = Kind::kBarrier;
  const char* name = "";
  std::shared_ptr<Comm> comm;
  HcclDataType type = HCCL_DATA_TYPE_INT8;
  HcclReduceOp reduce_op = HCCL_REDUCE_SUM;
  uint32_t root = 0;
  uint64_t count = 0;  // elements; for all-to-all 0, sizes are in `send`/`receive`
  const unsigned char* source = nullptr;
  unsigned char* target = nullptr;
  std::vector<uint64_t> send_bytes, send_at, receive_bytes, receive_at;
  void* holds[2] = {nullptr, nullptr};

  uint64_t type_bytes() const { return hccl_type_bytes(type); }
  uint32_t size() const { return comm->group.size(); }
  uint32_t rank() const { return comm->group.rank(); }
};

int barrier(Op& op) {
  Group& group = op.comm->group;
  const uint64_t phase = ++op.comm->phase;
  group.slot(op.rank()).phase.store(phase, std::memory_order_release);
  for (uint32_t r = 0; r < op.size(); ++r) {
    auto there = [&] { return group.slot(r).phase.load(std::memory_order_acquire) >= phase; };
    if (int code = group.wait(r, op.name, there)) return code;
  }
  return 0;
}

// Everybody says what it calls; one who calls something else is found before any data is used.
int agree(Op& op) {
  Group& group = op.comm->group;
  const uint64_t mine[4] = {
      static_cast<uint64_t>(op.kind), static_cast<uint64_t>(op.type), op.count,
      (static_cast<uint64_t>(op.root) << 8) | static_cast<uint64_t>(op.reduce_op)};
  std::memcpy(group.slot(op.rank()).signature, mine, sizeof mine);
  if (int code = barrier(op)) return code;
  for (uint32_t r = 0; r < op.size(); ++r) {
    if (std::memcmp(group.slot(r).signature, mine, sizeof mine) == 0) continue;
    group.abort(AbortReason::kMismatch, r);
    return group.report_abort(op.name);
  }
  return 0;
}

uint64_t part_bytes(const Op& op) { return kChunkBytes / op.size() / 64 * 64; }

int run_all_reduce(Op& op) {
  Group& group = op.comm->group;
  const uint64_t bytes = op.type_bytes();
  const uint64_t step =
      part_bytes(op) * op.size() / bytes;  // elements per round, same on all ranks
  for (uint64_t done = 0; done < op.count; done += step) {
    const uint64_t now = std::min(step, op.count - done);
    std::memcpy(group.chunk(op.rank()), op.source + done * bytes, now * bytes);
    if (int code = barrier(op)) return code;
    // Each rank reduces one piece for all.
    const uint64_t piece = (now + op.size() - 1) / op.size();
    const uint64_t from = std::min(now, piece * op.rank()), until = std::min(now, from + piece);
    std::vector<const unsigned char*> sources;
    for (uint32_t r = 0; r < op.size(); ++r) sources.push_back(group.chunk(r) + from * bytes);
    reduce(op.type, op.reduce_op, sources.data(), op.size(), until - from,
           group.result() + from * bytes);
    if (int code = barrier(op)) return code;
    std::memcpy(op.target + done * bytes, group.result(), now * bytes);
  }
  return 0;
}

int run_reduce_scatter(Op& op) {
  Group& group = op.comm->group;
  const uint64_t bytes = op.type_bytes(), part = part_bytes(op);
  const uint64_t step = part / bytes;
  for (uint64_t done = 0; done < op.count; done += step) {
    const uint64_t now = std::min(step, op.count - done);
    for (uint32_t r = 0; r < op.size(); ++r) {
      std::memcpy(group.chunk(op.rank()) + r * part, op.source + (r * op.count + done) * bytes,
                  now * bytes);
    }
    if (int code = barrier(op)) return code;
    std::vector<const unsigned char*> sources;
    for (uint32_t r = 0; r < op.size(); ++r) sources.push_back(group.chunk(r) + op.rank() * part);
    reduce(op.type, op.reduce_op, sources.data(), op.size(), now, op.target + done * bytes);
    if (int code = barrier(op)) return code;
  }
  return 0;
}

int run_broadcast(Op& op) {
  Group& group = op.comm->group;
  const uint64_t total = op.count * op.type_bytes();
  for (uint64_t done = 0; done < total; done += kChunkBytes) {
    const uint64_t now = std::min(kChunkBytes, total - done);
    if (op.rank() == op.root) std::memcpy(group.chunk(op.root), op.source + done, now);
    if (int code = barrier(op)) return code;
    if (op.rank() != op.root) std::memcpy(op.target + done, group.chunk(op.root), now);
    if (int code = barrier(op)) return code;
  }
  return 0;
}

int run_all_gather(Op& op) {
  Group& group = op.comm->group;
  const uint64_t total = op.count * op.type_bytes();
  for (uint64_t done = 0; done < total; done += kChunkBytes) {
    const uint64_t now = std::min(kChunkBytes, total - done);
    std::memcpy(group.chunk(op.rank()), op.source + done, now);
    if (int code = barrier(op)) return code;
    for (uint32_t r = 0; r < op.size(); ++r) {
      std::memcpy(op.target + r * total + done, group.chunk(r), now);
    }
    if (int code = barrier(op)) return code;
  }
  return 0;
}

// Publishes what this rank sends, compares with what it expects, finds the largest message.
int exchange_counts(Op& op, uint64_t* largest) {
  Group& group = op.comm->group;
  std::memcpy(group.counts(op.rank()), op.send_bytes.data(), op.size() * sizeof(uint64_t));
  if (int code = barrier(op)) return code;
  *largest = 0;
  for (uint32_t from = 0; from < op.size(); ++from) {
    for (uint32_t to = 0; to < op.size(); ++to) {
      *largest = std::max(*largest, group.counts(from)[to]);
    }
    if (group.counts(from)[op.rank()] != op.receive_bytes[from]) {
      group.abort(AbortReason::kMismatch, from);
    }
  }
  if (int code = barrier(op)) return code;
  return group.abort_word().load() == 0 ? 0 : group.report_abort(op.name);
}

int run_all_to_all(Op& op) {
  Group& group = op.comm->group;
  uint64_t largest = 0;
  if (int code = exchange_counts(op, &largest)) return code;
  const uint64_t part = part_bytes(op);
  for (uint64_t done = 0; done < largest; done += part) {
    auto now = [&](uint64_t bytes) { return bytes > done ? std::min(part, bytes - done) : 0; };
    for (uint32_t r = 0; r < op.size(); ++r) {
      const uint64_t bytes = now(op.send_bytes[r]);
      if (bytes > 0)
        std::memcpy(group.chunk(op.rank()) + r * part, op.source + op.send_at[r] + done, bytes);
    }
    if (int code = barrier(op)) return code;
    for (uint32_t r = 0; r < op.size(); ++r) {
      const uint64_t bytes = now(op.receive_bytes[r]);
      if (bytes > 0)
        std::memcpy(op.target + op.receive_at[r] + done, group.chunk(r) + op.rank() * part, bytes);
    }
    if (int code = barrier(op)) return code;
  }
  return 0;
}

int run_kind(Op& op) {
  switch (op.kind) {
    case Kind::kAllReduce:
      return run_all_reduce(op);
    case Kind::kReduceScatter:
      return run_reduce_scatter(op);
    case Kind::kBroadcast:
      return run_broadcast(op);
    case Kind::kAllGather:
      return run_all_gather(op);
    case Kind::kAllToAll:
      return run_all_to_all(op);
    case Kind::kBarrier:
      return 0;
  }
  return kAicpuException;
}

int run(void* ctx) {
  auto& op = *static_cast<Op*>(ctx);
  Comm& comm = *op.comm;
  // Users first, closed second: HcclCommDestroy looks at them in the other order.
  comm.users.fetch_add(1);
  int code;
  if (comm.closed.load()) {
    xsdTaskError("%s: the communicator was destroyed before it ran", op.name);
    code = kSuspectRemote;
  } else if (comm.group.check() != 0) {
    code = comm.group.report_abort(op.name);
  } else {
    std::lock_guard<std::mutex> lock(comm.op_mutex);
    code = agree(op);
    if (code == 0) code = run_kind(op);
    // The next operation may write its signature: all must have read this one's.
    if (code == 0) code = barrier(op);
  }
  comm.users.fetch_sub(1);
  return code;
}

void release(void* ctx) {
  auto* op = static_cast<Op*>(ctx);
  for (void* hold : op->holds) xsdMemoryRelease(hold);
  delete op;
}

HcclResult check_buffer(const Op& op, const void* buffer, uint64_t bytes, const char* side) {
  if (bytes == 0) return HCCL_SUCCESS;
  if (buffer == nullptr) return hccl_fail(HCCL_E_PTR, "%s: %s is null", op.name, side);
  if (xsdCheckRange(buffer, bytes) < 0) {
    return hccl_fail(HCCL_E_PARA, "%s: %s [%p, +%llu) is not inside one live allocation", op.name,
                     side, buffer, static_cast<unsigned long long>(bytes));
  }
  return HCCL_SUCCESS;
}

HcclResult launch(std::unique_ptr<Op> op, const void* source, uint64_t source_bytes, void* target,
                  uint64_t target_bytes, aclrtStream stream) {
  if (HcclResult code = check_buffer(*op, source, source_bytes, "sendBuf")) return code;
  if (HcclResult code = check_buffer(*op, target, target_bytes, "recvBuf")) return code;
  op->source = static_cast<const unsigned char*>(source);
  op->target = static_cast<unsigned char*>(target);
  op->holds[0] = source_bytes == 0 ? nullptr : xsdMemoryHold(source);
  op->holds[1] = target_bytes == 0 ? nullptr : xsdMemoryHold(target);
  const char* name = op->name;
  if (xsdStreamEnqueue(stream, name, run, op.release(), release) != 0) return HCCL_E_RUNTIME;
  return HCCL_SUCCESS;
}

// Null when the communicator or an argument is refused; *code says why.
std::unique_ptr<Op> make(Kind kind, const char* name, HcclComm comm, HcclDataType type,
                         uint64_t count, HcclResult* code) {
  auto op = std::make_unique<Op>();
  op->kind = kind;
  op->name = name;
  op->type = type;
  op->count = count;
  op->comm = find_comm(comm, name);
  *code = HCCL_SUCCESS;
  if (op->comm == nullptr) {
    *code = HCCL_E_PARA;
  } else if (hccl_type_bytes(type) == 0) {
    *code = hccl_fail(HCCL_E_NOT_SUPPORT, "%s: data type %d", name, static_cast<int>(type));
  } else if (count > (uint64_t{1} << 40)) {
    *code = hccl_fail(HCCL_E_PARA, "%s: count %llu", name, static_cast<unsigned long long>(count));
  }
  return *code == HCCL_SUCCESS ? std::move(op) : nullptr;
}

HcclResult check_reduction(Op& op, HcclReduceOp reduce_op) {
  if (static_cast<int>(reduce_op) < 0 || reduce_op > HCCL_REDUCE_MIN) {
    return hccl_fail(HCCL_E_PARA, "%s: reduce operation %d (0 to 3)", op.name,
                     static_cast<int>(reduce_op));
  }
  if (!reducible(op.type)) {
    return hccl_fail(HCCL_E_NOT_SUPPORT, "%s: data type %d cannot be reduced", op.name,
                     static_cast<int>(op.type));
  }
  op.reduce_op = reduce_op;
  return HCCL_SUCCESS;
}

// Byte sizes and places of one side of an all-to-all, and the span it covers.
bool lay_out(const uint64_t* counts, const uint64_t* places, uint32_t n, uint64_t type_bytes,
             std::vector<uint64_t>* bytes, std::vector<uint64_t>* at, uint64_t* span) {
  *span = 0;
  for (uint32_t r = 0; r < n; ++r) {
    if (counts[r] > (uint64_t{1} << 40) || places[r] > (uint64_t{1} << 40)) return false;
    bytes->push_back(counts[r] * type_bytes);
    at->push_back(places[r] * type_bytes);
    if (counts[r] > 0) *span = std::max(*span, at->back() + bytes->back());
  }
  return true;
}

HcclResult all_to_all(const char* name, const void* source, const uint64_t* send_counts,
                      const uint64_t* send_places, HcclDataType send_type, const void* target,
                      const uint64_t* receive_counts, const uint64_t* receive_places,
                      HcclDataType receive_type, HcclComm comm, aclrtStream stream) {
  HcclResult code;
  auto op = make(Kind::kAllToAll, name, comm, send_type, 0, &code);
  if (op == nullptr) return code;
  if (send_type != receive_type) {
    return hccl_fail(HCCL_E_PARA, "%s: send type %d, receive type %d", name,
                     static_cast<int>(send_type), static_cast<int>(receive_type));
  }
  uint64_t send_span = 0, receive_span = 0;
  if (!lay_out(send_counts, send_places, op->size(), op->type_bytes(), &op->send_bytes,
               &op->send_at, &send_span) ||
      !lay_out(receive_counts, receive_places, op->size(), op->type_bytes(), &op->receive_bytes,
               &op->receive_at, &receive_span)) {
    return hccl_fail(HCCL_E_PARA, "%s: a count or displacement is absurdly large", name);
  }
  return launch(std::move(op), source, send_span, const_cast<void*>(target), receive_span, stream);
}

}  // namespace
}  // namespace xsd

using namespace xsd;

HcclResult HcclAllReduce(void* source, void* target, uint64_t count, HcclDataType type,
                         HcclReduceOp reduce_op, HcclComm comm, aclrtStream stream) {
  HcclResult code;
  auto op = make(Kind::kAllReduce, "HcclAllReduce", comm, type, count, &code);
  if (op == nullptr) return code;
  if ((code = check_reduction(*op, reduce_op)) != HCCL_SUCCESS) return code;
  const uint64_t bytes = count * op->type_bytes();
  return launch(std::move(op), source, bytes, target, bytes, stream);
}

HcclResult HcclReduceScatter(void* source, void* target, uint64_t count, HcclDataType type,
                             HcclReduceOp reduce_op, HcclComm comm, aclrtStream stream) {
  HcclResult code;
  auto op = make(Kind::kReduceScatter, "HcclReduceScatter", comm, type, count, &code);
  if (op == nullptr) return code;
  if ((code = check_reduction(*op, reduce_op)) != HCCL_SUCCESS) return code;
  const uint64_t bytes = count * op->type_bytes(), ranks = op->size();
  return launch(std::move(op), source, bytes * ranks, target, bytes, stream);
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root,
                         HcclComm comm, aclrtStream stream) {
  HcclResult code;
  auto op = make(Kind::kBroadcast, "HcclBroadcast", comm, type, count, &code);
  if (op == nullptr) return code;
  if (root >= op->size()) {
    return hccl_fail(HCCL_E_PARA, "HcclBroadcast: root %u of %u ranks", root, op->size());
  }
  op->root = root;
  const uint64_t bytes = count * op->type_bytes();
  return launch(std::move(op), buffer, bytes, buffer, bytes, stream);
}

HcclResult HcclAllGather(void* source, void* target, uint64_t count, HcclDataType type,
                         HcclComm comm, aclrtStream stream) {
  HcclResult code;
  auto op = make(Kind::kAllGather, "HcclAllGather", comm, type, count, &code);
  if (op == nullptr) return code;
  const uint64_t bytes = count * op->type_bytes(), ranks = op->size();
  return launch(std::move(op), source, bytes, target, bytes * ranks, stream);
}

HcclResult HcclAlltoAll(const void* source, uint64_t send_count, HcclDataType send_type,
                        const void* target, uint64_t receive_count, HcclDataType receive_type,
                        HcclComm comm, aclrtStream stream) {
  auto found = find_comm(comm, "HcclAlltoAll");
  if (found == nullptr) return HCCL_E_PARA;
  std::vector<uint64_t> send(found->group.size(), send_count), receive(send.size(), receive_count);
  std::vector<uint64_t> send_at, receive_at;
  for (uint64_t r = 0; r < send.size(); ++r) {
    send_at.push_back(r * send_count);
    receive_at.push_back(r * receive_count);
  }
  return all_to_all("HcclAlltoAll", source, send.data(), send_at.data(), send_type, target,
                    receive.data(), receive_at.data(), receive_type, comm, stream);
}

HcclResult HcclAlltoAllV(const void* source, const void* send_counts, const void* send_places,
                         HcclDataType send_type, const void* target, const void* receive_counts,
                         const void* receive_places, HcclDataType receive_type, HcclComm comm,
                         aclrtStream stream) {
  if (send_counts == nullptr || send_places == nullptr || receive_counts == nullptr ||
      receive_places == nullptr) {
    return hccl_fail(HCCL_E_PTR, "HcclAlltoAllV: counts or displacements are null");
  }
  return all_to_all("HcclAlltoAllV", source, static_cast<const uint64_t*>(send_counts),
                    static_cast<const uint64_t*>(send_places), send_type, target,
                    static_cast<const uint64_t*>(receive_counts),
                    static_cast<const uint64_t*>(receive_places), receive_type, comm, stream);
}

HcclResult HcclBarrier(HcclComm comm, aclrtStream stream) {
  HcclResult code;
  auto op = make(Kind::kBarrier, "HcclBarrier", comm, HCCL_DATA_TYPE_INT8, 0, &code);
  if (op == nullptr) return code;
  return launch(std::move(op), nullptr, 0, nullptr, 0, stream);
}
