// Loaded before Azurite: ends it when its standard input ends, also if the parent was killed.
process.stdin.on("end", () => process.exit(0)).resume();
