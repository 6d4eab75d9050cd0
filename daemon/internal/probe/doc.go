// Package probe measures the link between a node and an owner, over connections that were opened as those of sessions are:
// round trip, rate and loss in both directions. Measure is the node's side, Admission and Slot are the owner's, and Expect
// and Findings say what the figures mean for programs.
//
//	node                                  owner
//	  PING, again and again         ->    PONG, with the owner's clock
//	  STATE_OF                      ->    STATE: what the owner's kernel has counted
//	  DATA ... END                  ->    reads, notes when how much had come: SAMPLES
//	  SEND: for so long, so much    ->    DATA ... END, and the node notes
//
// docs/protocol.md has the layout of the messages. The rate is that at which bytes arrive: the receiver asks its kernel now and then how many
// have come, and leaves out what it asked after the last one had, so that one that had to wait for a processor measures no other rate as long as
// the socket's buffer takes what comes meanwhile.
//
// Neither side trusts the other. Every message has a size that is checked before it is read, nothing is kept of DATA, and
// every wait has a deadline. A connection is used by one goroutine at a time.
package probe
