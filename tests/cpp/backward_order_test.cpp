// The order of backward's steps: that of forward in reverse, whichever hooks run.
#include "core/schedule/backward_order.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace fsdp::test {
namespace {

// A forward of units, each written as "name(" and ")name" around what it encloses. Unit numbers are
// digits; a dot behind a unit's end means that autograd did not record the call.
std::vector<CallId> run_forward(ForwardOrder& order, const std::string& events) {
  std::vector<CallId> open;
  std::vector<CallId> calls;
  order.begin_forward();
  for (std::size_t i = 0; i < events.size(); ++i) {
    if (events[i] == ')') {
      order.leave(open.back(), i + 1 == events.size() || events[i + 1] != '.');
      open.pop_back();
    } else if (events[i] != '(' && events[i] != '.') {
      open.push_back(order.enter(events[i] - '0'));
      calls.push_back(open.back());
    }
  }
  order.end_forward();
  return calls;
}

// The steps in the order in which they are taken: "G1" gathers unit 1, "P1" passes it.
std::string take(BackwardOrder& order, std::size_t count) {
  std::string taken;
  for (; count > 0; --count) {
    const BackwardStep step = order.take();
    taken += step.action == BackwardAction::Gather      ? 'G'
             : step.action == BackwardAction::Pass      ? 'P'
             : step.action == BackwardAction::Recompute ? 'r'
                                                        : '-';
    taken += std::to_string(step.unit);
  }
  return taken;
}

std::string take_all(BackwardOrder& order) { return take(order, order.steps().size()); }

BackwardGraph graph_of(std::vector<CallId> calls) {
  BackwardGraph graph;
  graph.calls = std::move(calls);
  graph.is_whole = false;
  return graph;
}

class Orders : public ::testing::Test {
 protected:
  void begin(const BackwardGraph& graph = {}) { backward.begin(forward.passes(), graph); }
  std::string reach(CallId call) { return take(backward, backward.until_gather(call)); }
  std::string pass(CallId call) { return take(backward, backward.until_pass(call)); }

  ForwardOrder forward;
  BackwardOrder backward;
};

TEST_F(Orders, BackwardTakesTheStepsOfForwardInReverse) {
  run_forward(forward, "0(1()2(3()))");
  begin();
  EXPECT_EQ(take_all(backward), "G0G2G3P3P2G1P1P0");
}

TEST_F(Orders, AHookTakesTheStepsOfCallsWhoseHooksDidNotRun) {
  const std::vector<CallId> calls = run_forward(forward, "0(1()2()3())");
  begin();
  EXPECT_EQ(reach(calls[3]), "G0G3");
  EXPECT_EQ(reach(calls[3]), "");  // another output of the same call
  EXPECT_EQ(reach(calls[1]), "P3G2P2G1");
  EXPECT_EQ(pass(calls[2]), "");
  EXPECT_EQ(pass(calls[1]), "P1");
  EXPECT_EQ(take_all(backward), "P0");
}

TEST_F(Orders, EachCallOfAUnitHasStepsOfItsOwn) {
  const std::vector<CallId> calls = run_forward(forward, "0(1()2()1())");
  begin();
  EXPECT_EQ(reach(calls[3]), "G0G1");
  EXPECT_EQ(pass(calls[3]), "P1");
  EXPECT_EQ(reach(calls[1]), "G2P2G1");
}

TEST_F(Orders, UnitsThatTheGraphDoesNotContainHaveNoSteps) {
  const std::vector<CallId> calls = run_forward(forward, "0(1()2()3())");
  begin(graph_of({calls[1]}));
  EXPECT_EQ(take_all(backward), "G0G1P1P0");  // unit 0 encloses unit 1
}

TEST_F(Orders, AllCallsOfAUnitHaveStepsIfTheGraphContainsOne) {
  const std::vector<CallId> calls = run_forward(forward, "0(1()2()1())");
  begin(graph_of({calls[0], calls[1]}));
  EXPECT_EQ(take_all(backward), "G0G1P1G1P1P0");
}

TEST_F(Orders, UnitsThatAreExpectedHaveStepsInAnyCase) {
  const std::vector<CallId> calls = run_forward(forward, "0(1()2()3())");
  forward.expect(calls[3]);
  backward.set_expected(2, true);
  begin(graph_of({calls[0]}));
  EXPECT_EQ(take_all(backward), "G0G3P3G2P2P0");
  backward.set_expected(2, false);
  begin(graph_of({calls[0]}));
  EXPECT_EQ(take_all(backward), "G0G3P3P0");
}

TEST_F(Orders, TwoForwardsMayHaveOneBackwardOrTwo) {
  const std::vector<CallId> first = run_forward(forward, "0(1())");
  const std::vector<CallId> second = run_forward(forward, "0(2())");
  begin(graph_of({first[0], first[1], second[0], second[1]}));
  EXPECT_EQ(take_all(backward), "G0G2P2P0G0G1P1P0");
  begin(graph_of({first[1]}));
  EXPECT_EQ(take_all(backward), "G0G1P1P0");
  begin(graph_of({second[1]}));
  EXPECT_EQ(take_all(backward), "G0G2P2P0");
}

TEST_F(Orders, ForwardsThatAreDoneAreForgotten) {
  const std::vector<CallId> first = run_forward(forward, "0(1())");
  const std::vector<CallId> second = run_forward(forward, "0(2())");
  begin(graph_of({second[0]}));
  const std::vector<CallId> third = run_forward(forward, "0(3())");
  EXPECT_EQ(forward.passes().size(), 2U);
  EXPECT_EQ(forward.first_call(), first[0]);
  EXPECT_LT(second[1], third[0]);
  begin(graph_of({second[0]}));
  EXPECT_EQ(take_all(backward), "");
  begin();
  EXPECT_EQ(take_all(backward), "G0G3P3P0G0G1P1P0");
  forward.begin_forward();
  EXPECT_EQ(forward.passes().size(), 1U);
  EXPECT_LT(third[1], forward.first_call());
}

TEST_F(Orders, AForwardWhoseGraphIsKeptIsNotForgotten) {
  const std::vector<CallId> calls = run_forward(forward, "0(1())");
  BackwardGraph graph = graph_of(calls);
  graph.is_kept = true;
  begin(graph);
  run_forward(forward, "0(2())");
  begin(graph);
  EXPECT_EQ(take_all(backward), "G0G1P1P0");
  forward.begin_forward(/*forgets_all=*/true);
  EXPECT_EQ(forward.passes().size(), 1U);
}

TEST_F(Orders, AnEvaluationIsForgottenAtOnce) {
  run_forward(forward, "0(1().).");
  EXPECT_TRUE(forward.passes().empty());
}

TEST_F(Orders, CallsThatDoNotLeaveHaveNoSteps) {
  forward.begin_forward();
  const CallId root = forward.enter(0);
  const CallId failed = forward.enter(1);
  forward.enter(2);
  const CallId next = forward.enter(3);
  forward.leave(next, true);
  forward.leave(root, true);
  forward.end_forward();
  begin();
  EXPECT_EQ(reach(failed), "");
  EXPECT_EQ(take_all(backward), "G0G3P3P0");
}

// Unit 1 and 2 are a region. A with-gradient unit is behind it, and one in front.
TEST_F(Orders, ARecomputedRegionTakesItsStepsInItsOwnBackward) {
  const std::vector<CallId> calls = run_forward(forward, "0(4()1().2().3())");
  begin();
  EXPECT_EQ(reach(calls[0]), "G0");
  EXPECT_TRUE(backward.is_recomputed(1));
  EXPECT_FALSE(backward.is_recomputed(4));  // recomputed in another way, as its step is Gather
  EXPECT_EQ(take(backward, backward.until_recomputation(1)), "G3P3");
  const CallId one = backward.enter(1);
  backward.leave(one, 1);
  EXPECT_TRUE(backward.is_recomputed(2));
  EXPECT_EQ(backward.until_recomputation(2), 0U);
  const CallId two = backward.enter(2);
  backward.leave(two, 2);
  EXPECT_FALSE(backward.is_recomputed(2));
  EXPECT_EQ(reach(two), "G2");
  EXPECT_EQ(reach(one), "P2G1");
  EXPECT_EQ(reach(calls[1]), "P1-2-1G4");
  EXPECT_EQ(take_all(backward), "P4P0");
}

TEST_F(Orders, AUnitThatIsRecomputedTwiceHasTwoSecondRuns) {
  run_forward(forward, "0(1().2()1().)");
  begin();
  EXPECT_EQ(take(backward, backward.until_recomputation(1)), "G0");
  backward.leave(backward.enter(1), 1);
  EXPECT_EQ(take(backward, 2), "G1P1");
  EXPECT_TRUE(backward.is_recomputed(1));
  EXPECT_EQ(take(backward, backward.until_recomputation(1)), "-1G2P2");
  EXPECT_TRUE(BackwardOrder::is_recomputed_call(backward.enter(1)));
  EXPECT_FALSE(backward.is_recomputed(1));
}

}  // namespace
}  // namespace fsdp::test
