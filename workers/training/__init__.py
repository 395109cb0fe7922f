"""Inside the rank: communicator generations, iterations, state. The only room with torch."""
