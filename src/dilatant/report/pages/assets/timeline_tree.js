// The lines of a timeline: lanes grouped by unit and replica, and which groups are open at first.

const ROWS_OPENED = 26, FEW = 4, CHUNK = 16;

// Lanes as a tree: unit, replicas (in chunks where there are many), stages. Single children are not nested.
function buildTree(data) {
  const unitsOf = (lane) => [...new Set(data.lanes[lane].stages.map((stage) => data.stages[stage][0]))];
  const placeOf = (lane) => data.stages[data.lanes[lane].stages[0]];
  const groups = new Map();
  data.lanes.forEach((_, lane) => {
    const key = unitsOf(lane).map((unit) => data.units[unit]).join(" + ") || "other";
    const replica = data.lanes[lane].stages.length ? placeOf(lane)[1] : 0;
    if (!groups.has(key)) groups.set(key, new Map());
    const replicas = groups.get(key);
    replicas.set(replica, [...(replicas.get(replica) ?? []), lane]);
  });
  const leaf = (lane, name) => ({ name: `${name} · ${ranksName(data.lanes[lane].ranks)}`, lanes: [lane], children: [] });
  const node = (name, children) => ({ name, lanes: children.flatMap((child) => child.lanes), children, open: false });
  return [...groups].map(([unit, replicas]) => {
    const parts = [...replicas].map(([replica, lanes]) => {
      const name = replicas.size > 1 ? `replica ${replica}` : unit;
      if (lanes.length === 1) return leaf(lanes[0], name);
      return node(name, lanes.map((lane, order) => leaf(lane, `stage ${placeOf(lane)?.[2] ?? order}`)));
    });
    if (parts.length === 1) return parts[0];
    const keys = [...replicas.keys()];
    const children = parts.length <= FEW ? parts : [parts[0], gather(parts.slice(1), keys.slice(1))];
    return node(`${unit} (${parts.length} replicas)`, children);
  });

  // Many replicas: the first stays in sight as a sample, the others go into groups of groups.
  function gather(parts, keys) {
    const name = `replicas ${keys[0]}–${keys.at(-1)}`;
    if (parts.length <= CHUNK) return node(name, parts);
    const size = Math.max(CHUNK, Math.ceil(parts.length / CHUNK)), children = [];
    for (let first = 0; first < parts.length; first += size) children.push(gather(parts.slice(first, first + size), keys.slice(first, first + size)));
    return node(name, children);
  }
}

function ranksName(ranks) {
  return `${/[–,]/.test(ranks) ? "ranks" : "rank"} ${ranks}`;
}

// Open every group of a level while the rows stay few; then at least the sample replica of each unit.
function openSome(roots) {
  const rows = (nodes) => nodes.reduce((sum, node) => sum + 1 + (node.open ? rows(node.children) : 0), 0);
  for (let level = roots; level.length; level = level.flatMap((node) => node.children)) {
    if (rows(roots) + level.reduce((sum, node) => sum + node.children.length, 0) > ROWS_OPENED) break;
    level.forEach((node) => { node.open = node.children.length > 0; });
  }
  for (const root of roots) {
    root.open = root.children.length > 0;
    if (root.children[0]?.children.length <= ROWS_OPENED) root.children[0].open = root.children[0].children.length > 0;
  }
}
