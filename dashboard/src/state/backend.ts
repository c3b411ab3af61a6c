/** Where the state comes from: a coordinator, or a simulation. Both feed the same reducer. */

import type { Transport } from "../api/client";
import type { Action } from "./types";

export interface Backend {
  /** Starts dispatching; returns a function that stops it. */
  start(dispatch: (action: Action) => void): () => void;
  /** Serves what views request beside the state: plans, previews, searches, changes. */
  transport: Transport;
}
