// Package data opens the connections of sessions: tickets, the challenge and response that use
// a ticket, the listener of an owner, the dialer of a host, and the relays of encrypted
// connections. It moves no byte of a session itself: it passes on the connected socket.
//
//	host                                        owner
//	  Dialer.Open: Offer over gRPC        ->    Server.Offer: ticket, secret
//	  dial, HELLO (ticket's id, nonce)    ->    Serve: a bounded number, 5 s each
//	  checks the owner's proof            <-    CHALLENGE (nonce, proof)
//	  RESPONSE (proof)                    ->    ticket used up; Config.Admit takes the socket
//	  hands the socket to the shim        <-    RESULT
//
// The connections of a probe (probe.go), which measures the link, are opened in the same way, and then given to package probe.
//
// docs/protocol.md has the layout. Both proofs are HMACs with the secret, which came over gRPC
// and never crosses this connection.
package data
