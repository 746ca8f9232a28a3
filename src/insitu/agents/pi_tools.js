// Gives Pi the host tools of an insitu session: one Pi tool each, forwarded to the tool endpoint.
// The gateway checks the arguments and acknowledges; nothing else ever comes back.
//   INSITU_TOOLS_URL   http://127.0.0.1:PORT/tools/PUBLIC_ID
//   INSITU_TOOLS_KEY   the session's tool secret

export default async function (pi) {
  const url = process.env.INSITU_TOOLS_URL;
  const key = process.env.INSITU_TOOLS_KEY;
  if (!url || !key) return;
  // What the agent runs must not inherit it.
  delete process.env.INSITU_TOOLS_KEY;
  const headers = { authorization: `Bearer ${key}`, "content-type": "application/json" };
  const list = await fetch(url, { headers, signal: AbortSignal.timeout(10_000) });
  if (!list.ok) throw new Error(`host tools: HTTP ${list.status}`);
  for (const tool of (await list.json()).tools) {
    pi.registerTool({
      name: tool.name,
      label: tool.name,
      description: tool.description,
      parameters: tool.inputSchema,
      async execute(_id, params, signal) {
        const answer = await fetch(`${url}/${encodeURIComponent(tool.name)}`, {
          method: "POST",
          headers,
          body: JSON.stringify(params),
          signal,
        });
        const text = await answer.text();
        if (!answer.ok) throw new Error(text);
        return { content: [{ type: "text", text }], details: undefined };
      },
    });
  }
}
