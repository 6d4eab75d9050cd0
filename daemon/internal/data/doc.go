// Package data opens the connections that sessions flow through: tickets, the
// challenge and response that uses one up, the listener of an owner, the dialling
// of a host, and the relays of encrypted connections. It moves no byte of a
// session itself: a connected socket is handed on to who does.
//
//	host                                        owner
//	  Dialer.Open: Offer over gRPC        ->    Server.Offer: ticket, secret
//	  dial, HELLO (ticket's id, nonce)    ->    Serve: a bounded number, 5 s each
//	  checks the owner's proof            <-    CHALLENGE (nonce, proof)
//	  RESPONSE (proof)                    ->    ticket used up; Config.Admit takes the socket
//	  hands the socket to the shim        <-    RESULT
//
// The layout is in docs/protocol.md. Both proofs are HMACs with the secret, which
// came over gRPC and never crosses this connection.
package data
