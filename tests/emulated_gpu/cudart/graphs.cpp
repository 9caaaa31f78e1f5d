#include "graphs.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <utility>

#include "captures.h"
#include "errors.h"
#include "events.h"
#include "settings.h"
#include "streams.h"

namespace emulated_gpu {
namespace {

using Nodes = std::vector<Node>;

struct Graph {
  std::shared_ptr<const Nodes> nodes;
};
Graph& as_graph(cudaGraph_t handle) { return *reinterpret_cast<Graph*>(handle); }

struct Executable {
  std::shared_ptr<const Nodes> nodes;
  unsigned launches = 0;                    // of these nodes
  std::vector<unsigned long long> streams;  // that nodes are for the checker
  std::shared_ptr<Record> last_end;         // of a launch
  unsigned long long last_stream = 0;
};
Executable& as_executable(cudaGraphExec_t handle) { return *reinterpret_cast<Executable*>(handle); }

const Node& as_node(cudaGraphNode_t handle) { return *reinterpret_cast<const Node*>(handle); }
cudaGraphNode_t handle_of(const Node& node) {
  return reinterpret_cast<cudaGraphNode_t>(const_cast<Node*>(&node));
}

// Calls run(number) for each node, in a random order in which every node comes after its
// predecessors. A missing edge then gives wrong numbers. Ranks take the number of the replay as
// `seed`, so all of them run a graph's collectives in the same order.
void run_in_some_order(const std::vector<std::set<std::size_t>>& after, unsigned seed,
                       const std::function<void(std::size_t)>& run) {
  std::minstd_rand random(seed + 1);
  std::vector<std::size_t> missing(after.size());
  std::vector<std::vector<std::size_t>> next(after.size());
  std::vector<std::size_t> ready;
  for (std::size_t number = 0; number < after.size(); ++number) {
    missing[number] = after[number].size();
    for (const std::size_t before : after[number]) {
      next[before].push_back(number);
    }
    if (missing[number] == 0) {
      ready.push_back(number);
    }
  }
  while (!ready.empty()) {
    std::swap(ready[random() % ready.size()], ready.back());
    const std::size_t number = ready.back();
    ready.pop_back();
    run(number);
    for (const std::size_t later : next[number]) {
      if (--missing[later] == 0) {
        ready.push_back(later);
      }
    }
  }
}

// The first replay shows what nodes use.
void replay(const Nodes& nodes, unsigned seed) {
  std::vector<GraphNode> noted;
  std::vector<std::set<std::size_t>> after;
  for (const Node& node : nodes) {
    noted.push_back({node.origin, node.after, {}});
    after.push_back(node.after);
  }
  run_in_some_order(after, seed, [&](std::size_t number) {
    noted[number].accesses = run_noted(nodes[number].work);
  });
  if (seed == 0 && settings().finds_races) {
    check_graph(noted);
  }
}

// - Launches of graphs with external events
//
// Others can come after some nodes of such a launch and not after the rest. So each node is a
// stream of its own for the checker, and a launch is as much work as it has nodes.

struct Launch {
  std::vector<Work> works;  // these three by node
  std::vector<TicketPtr> tickets;
  std::vector<std::set<std::size_t>> after;
};

bool has_external_events(const Nodes& nodes) {
  return std::any_of(nodes.begin(), nodes.end(),
                     [](const Node& node) { return node.external != nullptr; });
}

// Records events, and finds the records to wait for. They are those that the host knows now.
Launch prepare(Executable& executable, Stream& stream) {
  Launch launch;
  const TicketPtr whole = stream.order.next(origin_of("a replay of a graph", stream.id));
  const Clock start = whole != nullptr ? whole->before : Clock();
  std::map<const Event*, std::size_t> recorded;  // by this launch, in these nodes
  std::vector<Clock> ends;
  while (executable.streams.size() < executable.nodes->size()) {
    executable.streams.push_back(new_stream_id());
  }
  const std::lock_guard<std::mutex> lock(capture_mutex());
  for (const Node& node : *executable.nodes) {
    std::set<std::size_t> after = node.after;
    Work work = node.work;
    Clock before = start;
    if (node.type == cudaGraphNodeTypeWaitEvent) {
      if (const auto found = recorded.find(node.external.get()); found != recorded.end()) {
        after.insert(found->second);
      }
      const std::shared_ptr<Record> record = node.external->last_record();
      before.join(record != nullptr ? record->clock : Clock());
      work = [record] {
        if (record != nullptr) {
          record->wait();
        }
      };
    }
    for (const std::size_t number : after) {
      before.join(ends[number]);
    }
    if (node.type == cudaGraphNodeTypeEventRecord) {
      const std::shared_ptr<Record> record = node.external->next_record(before);
      work = [record] { record->reach(); };
      recorded[node.external.get()] = node.number;
    }
    const std::uint64_t id = executable.streams[node.number];
    Clock end = before;
    const User user{id, end.advance(id), node.origin};
    launch.tickets.push_back(
        whole != nullptr ? std::make_shared<Ticket>(Ticket{user, std::move(before)}) : nullptr);
    launch.works.push_back(std::move(work));
    launch.after.push_back(std::move(after));
    ends.push_back(std::move(end));
  }
  for (const Clock& end : ends) {
    stream.order.wait_for(end);
  }
  return launch;
}

void run(const Launch& launch, unsigned seed) {
  run_in_some_order(launch.after, seed, [&](std::size_t number) {
    run_checked(launch.tickets[number], launch.works[number]);
  });
}

// - Updates

// A difference between the nodes of a graph and those that an executable graph has.
cudaGraphExecUpdateResultInfo difference(const Nodes& old, const Nodes& nodes) {
  if (nodes.size() != old.size()) {
    return {cudaGraphExecUpdateErrorTopologyChanged, nullptr, nullptr};
  }
  for (std::size_t number = 0; number < nodes.size(); ++number) {
    const Node& node = nodes[number];
    const std::set<std::size_t>& before = old[number].after;
    if (node.after.size() != before.size()) {
      return {cudaGraphExecUpdateErrorTopologyChanged, handle_of(node), nullptr};
    }
    for (const std::size_t from : node.after) {
      if (before.count(from) == 0) {
        return {cudaGraphExecUpdateErrorTopologyChanged, handle_of(node), handle_of(nodes[from])};
      }
    }
    if (node.type != old[number].type) {
      return {cudaGraphExecUpdateErrorNodeTypeChanged, handle_of(node), nullptr};
    }
  }
  return {cudaGraphExecUpdateSuccess, nullptr, nullptr};
}

// Fills what CUDA's functions return in arrays that the caller may leave out, to learn the count.
cudaError_t give(const std::vector<cudaGraphNode_t>& found, cudaGraphNode_t* nodes,
                 std::size_t* count) {
  if (nodes != nullptr) {
    *count = std::min(*count, found.size());
    std::copy_n(found.begin(), *count, nodes);
  } else {
    *count = found.size();
  }
  return cudaSuccess;
}

}  // namespace

cudaGraph_t new_graph(Nodes nodes) {
  for (std::size_t number = 0; number < nodes.size(); ++number) {
    nodes[number].number = number;
  }
  return reinterpret_cast<cudaGraph_t>(new Graph{std::make_shared<const Nodes>(std::move(nodes))});
}

}  // namespace emulated_gpu

using namespace emulated_gpu;

extern "C" {

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t graph,
                                          unsigned long long /*flags*/) {
  auto made = std::make_unique<Executable>();
  made->nodes = as_graph(graph).nodes;
  *executable = reinterpret_cast<cudaGraphExec_t>(made.release());
  return cudaSuccess;
}

// Launches of an executable graph come after each other, on whatever streams.
cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  Executable& executable = as_executable(handle);
  const std::shared_ptr<Stream> stream = Stream::of(stream_handle);
  if (stream == nullptr) {
    return failed(cudaErrorInvalidResourceHandle, "the stream was destroyed");
  }
  const auto replay_all = [nodes = executable.nodes, seed = executable.launches++] {
    replay(*nodes, seed);
  };
  const bool has_external = has_external_events(*executable.nodes);
  if (is_captured(*stream)) {
    if (has_external) {
      return failed(cudaErrorNotSupported, "a graph with external events, in another graph");
    }
    stream->submit({"a replay of a graph", cudaGraphNodeTypeGraph}, replay_all);
    return outcome();
  }
  if (const cudaError_t error = stream->follow_implicitly()) {
    return error;
  }
  if (executable.last_end != nullptr && executable.last_stream != stream->id) {
    stream->order.wait_for(executable.last_end->clock);
    stream->submit("a wait for a replay", [end = executable.last_end] { end->wait(); });
  }
  if (has_external) {
    stream->submit_parts([launch = prepare(executable, *stream), seed = executable.launches - 1] {
      run(launch, seed);
    });
  } else {
    stream->submit("a replay of a graph", replay_all);
  }
  executable.last_end = std::make_shared<Record>(stream->order.now());
  executable.last_stream = stream->id;
  stream->submit("the end of a replay", [end = executable.last_end] { end->reach(); });
  return outcome();
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t handle, cudaGraph_t graph,
                                cudaGraphExecUpdateResultInfo* result) {
  Executable& executable = as_executable(handle);
  *result = difference(*executable.nodes, *as_graph(graph).nodes);
  if (result->result != cudaGraphExecUpdateSuccess) {
    return failed(cudaErrorGraphExecUpdateFailure, "the graph has other nodes or edges");
  }
  executable.nodes = as_graph(graph).nodes;
  executable.launches = 0;
  return outcome();
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete &as_graph(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete &as_executable(executable);
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t* nodes, std::size_t* count) {
  std::vector<cudaGraphNode_t> found;
  for (const Node& node : *as_graph(graph).nodes) {
    found.push_back(handle_of(node));
  }
  return give(found, nodes, count);
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = as_node(node).type;
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t handle, cudaGraphNode_t* nodes,
                                         cudaGraphEdgeData* edges, std::size_t* count) {
  const Node& node = as_node(handle);
  const Node* first = &node - node.number;
  std::vector<cudaGraphNode_t> found;
  for (const std::size_t number : node.after) {
    found.push_back(handle_of(first[number]));
  }
  give(found, nodes, count);
  if (edges != nullptr) {
    std::fill_n(edges, *count, cudaGraphEdgeData());
  }
  return cudaSuccess;
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char* path, unsigned /*flags*/) {
  std::ofstream file(path);
  file << "digraph {\n";
  for (const Node& node : *as_graph(graph).nodes) {
    file << "  " << node.number << " [label=\"" << node.what << "\"];\n";
    for (const std::size_t before : node.after) {
      file << "  " << before << " -> " << node.number << ";\n";
    }
  }
  file << "}\n";
  return file.good() ? cudaSuccess : failed(cudaErrorOperatingSystem, "the file is not written");
}
}
