// Where the nodes of a graph go. Small graphs are laid out by dagre; for large ones its search for few crossings
// takes seconds, and layers ordered by the mean place of what they read are drawn instead.

const LARGE = 250;
const TRIED = 40; // steps of a graph that is laid out in several ways
const GAP = { x: 26, y: 46 };

// nodes: [{id, width, height, group}], edges: [{from, to, width, height}], groups: [{id, parent}] -> places and bends,
// in the same order, and the boxes around groups.
function layout(nodes, edges, groups) {
  return nodes.length > LARGE ? layered(nodes, edges) : byDagre(nodes, edges, groups);
}

// Where dagre ends depends on the order in which it is told of nodes and edges: of both orders of each, the one with
// the shortest edges is drawn.
function byDagre(nodes, edges, groups) {
  const orders = nodes.length > TRIED ? [[1, 1]] : [[1, 1], [1, -1], [-1, 1], [-1, -1]];
  const placed = orders.map(([ofNodes, ofEdges]) => placedByDagre(nodes, edges, groups, ofNodes, ofEdges));
  const length = ({ points }) => points.slice(1).reduce((sum, to, n) => sum + Math.hypot(to.x - points[n].x, to.y - points[n].y), 0);
  const lengths = placed.map((each) => each.edges.reduce((sum, edge) => sum + length(edge), 0));
  return placed[lengths.indexOf(Math.min(...lengths))];
}

function placedByDagre(nodes, edges, groups, ofNodes, ofEdges) {
  const ordered = (found, way) => (way > 0 ? found : [...found].reverse());
  const graph = new dagre.graphlib.Graph({ multigraph: true, compound: groups.length > 0 });
  graph.setGraph({ rankdir: "TB", nodesep: GAP.x, ranksep: 30, edgesep: 14, marginx: 16, marginy: groups.length ? 30 : 16 });
  graph.setDefaultEdgeLabel(() => ({}));
  for (const group of groups) graph.setNode(group.id, {});
  for (const group of groups) if (group.parent) graph.setParent(group.id, group.parent);
  for (const node of ordered(nodes, ofNodes)) {
    graph.setNode(String(node.id), { width: node.width, height: node.height });
    if (node.group) graph.setParent(String(node.id), node.group);
  }
  for (const [number, edge] of ordered([...edges.entries()], ofEdges)) {
    graph.setEdge(String(edge.from), String(edge.to), { width: edge.width, height: edge.height, labelpos: "c" }, String(number));
  }
  dagre.layout(graph);
  const boxes = groups.map((group) => ({ group, ...graph.node(group.id) }));
  return {
    nodes: nodes.map((node) => graph.node(String(node.id))),
    edges: edges.map((edge, number) => graph.edge(String(edge.from), String(edge.to), String(number))),
    boxes: boxes.filter((box) => box.width),
  };
}

function layered(nodes, edges) {
  const place = new Map(nodes.map((node, number) => [node.id, number]));
  const into = nodes.map(() => []);
  const out = nodes.map(() => []);
  for (const edge of edges) {
    into[place.get(edge.to)].push(place.get(edge.from));
    out[place.get(edge.from)].push(place.get(edge.to));
  }
  const rank = ranks(nodes.length, into, out);
  const rows = [];
  rank.forEach((row, number) => (rows[row] = rows[row] || []).push(number));
  const order = nodes.map(() => 0);
  const number = (row) => row.forEach((node, index) => (order[node] = index / row.length));
  rows.forEach(number);
  for (let sweep = 0; sweep < 4; sweep += 1) {
    const near = sweep % 2 ? out : into;
    for (const row of sweep % 2 ? [...rows].reverse() : rows) {
      const mean = (node) => (near[node].length ? near[node].reduce((sum, other) => sum + order[other], 0) / near[node].length : order[node]);
      const at = new Map(row.map((node) => [node, mean(node)]));
      row.sort((a, b) => at.get(a) - at.get(b));
      number(row);
    }
  }
  return spread(nodes, edges, rows, place);
}

// The longest way from a source, without recursion: graphs are deep.
function ranks(count, into, out) {
  const rank = new Array(count).fill(0);
  const open = into.map((before) => before.length);
  const ready = open.flatMap((left, node) => (left ? [] : [node]));
  while (ready.length) {
    const node = ready.pop();
    for (const next of out[node]) {
      rank[next] = Math.max(rank[next], rank[node] + 1);
      open[next] -= 1;
      if (!open[next]) ready.push(next);
    }
  }
  return rank;
}

// Rows wider than a square of all nodes would be are broken into several lines.
function spread(nodes, edges, rows, place) {
  const area = nodes.reduce((sum, node) => sum + (node.width + GAP.x) * (node.height + GAP.y), 0);
  const most = Math.max(Math.sqrt(area) * 1.6, 600);
  const found = new Array(nodes.length);
  let y = 30;
  for (const row of rows) {
    let line = [];
    let width = 0;
    const flush = () => {
      let x = -width / 2;
      for (const node of line) {
        found[node] = { x: x + nodes[node].width / 2, y, width: nodes[node].width, height: nodes[node].height };
        x += nodes[node].width + GAP.x;
      }
      y += Math.max(...line.map((node) => nodes[node].height)) + GAP.y;
      [line, width] = [[], 0];
    };
    for (const node of row) {
      if (width > most) flush();
      line.push(node);
      width += nodes[node].width + GAP.x;
    }
    flush();
  }
  const left = Math.min(...found.map((node) => node.x - node.width / 2)) - 16;
  for (const node of found) node.x -= left;
  const bends = edges.map((edge) => {
    const [a, b] = [found[place.get(edge.from)], found[place.get(edge.to)]];
    return { points: [{ x: a.x, y: a.y + a.height / 2 }, { x: b.x, y: b.y - b.height / 2 }] };
  });
  return { nodes: found, edges: bends, boxes: [] };
}

// A smooth line through the bends of an edge.
function curve(points) {
  const middle = (a, b) => `${(a.x + b.x) / 2} ${(a.y + b.y) / 2}`;
  if (points.length === 2) {
    const [a, b] = points;
    const y = (a.y + b.y) / 2;
    return `M${a.x} ${a.y}C${a.x} ${y} ${b.x} ${y} ${b.x} ${b.y}`;
  }
  const parts = [`M${points[0].x} ${points[0].y}L${middle(points[0], points[1])}`];
  for (let n = 1; n < points.length - 1; n += 1) {
    parts.push(`Q${points[n].x} ${points[n].y} ${middle(points[n], points[n + 1])}`);
  }
  const last = points[points.length - 1];
  return `${parts.join("")}L${last.x} ${last.y}`;
}
